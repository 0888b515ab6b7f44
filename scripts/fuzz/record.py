"""Record the seeds: the messages of real transfers on the protocol ring, as they arrive.

    python scripts/fuzz/record.py

Rewrites seeds/prefill, seeds/decode and seeds/announcement, but for what a run has found there
(found-*).
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import managers
import msgspec
from mutate import pack

from sglang_mixkv.protocol.announcement import announcement

SEEDS = Path(__file__).parent / "seeds"


def keep(side: str, what: str, content: bytes) -> None:
    name = f"{what}-{hashlib.sha256(content).hexdigest()[:8]}"
    (SEEDS / side / name).write_bytes(content)


@contextmanager
def listening(name: str) -> Iterator[None]:
    """Keep each message that a manager checks, the first three together, and the prefill's
    facts. By the class, for ranks that start meanwhile: their first message comes at once."""
    manager_class = importlib.import_module("sglang_mixkv.engine.manager").SidedManager
    real, seen = manager_class.may_pass, []

    def kept(manager: Any, frames: list[bytes]) -> bool:
        side, rank = manager.disaggregation_mode.value, manager.kv_args.engine_rank
        if side == "prefill" and not seen:
            facts = announcement(manager.side.local.facts)
            keep("announcement", name, msgspec.json.encode(facts))
        seen.append(frames)
        keep(side, f"{name}{rank}-message", pack([frames]))
        if len(seen) == 3:
            keep(side, f"{name}{rank}-messages", pack(seen))
        return bool(real(manager, frames))

    with mock.patch.object(manager_class, "may_pass", kept):
        yield


def forget(side: str) -> None:
    """The messages that were recorded before. Inputs that found something stay."""
    (SEEDS / side).mkdir(parents=True, exist_ok=True)
    for seed in (SEEDS / side).iterdir():
        if not seed.name.startswith("found-"):
            seed.unlink()


def main() -> None:
    managers.load()
    ring = importlib.import_module("rig.ring")
    for side in ("prefill", "decode", "announcement"):
        forget(side)
    for name, case in managers.cases().items():
        # Aux data over the control channel, as with NVLink pools.
        os.environ["SGLANG_MOONCAKE_SEND_AUX_TCP"] = str(int(name == "hybrid"))
        with listening(name):
            outcome = ring.run(case)
        assert outcome.statuses == {"success"}, outcome.wrong
    from sglang.srt.disaggregation.common.conn import AbortAck, AbortNotification

    for abort in (AbortNotification(100), AbortNotification(100, "127.0.0.1", 17009, 1)):
        keep("prefill", "abort", pack([abort.to_zmq()]))
    for ack in (AbortAck(100, 0), AbortAck(100, 1, 1)):
        keep("decode", "ack", pack([ack.to_zmq()]))
    keep("decode", "failure", pack([[b"101", b"0", b"1", b"a reason"]]))


if __name__ == "__main__":
    main()
