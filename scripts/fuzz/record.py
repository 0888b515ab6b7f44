"""Record the seeds: the messages of real transfers on the protocol ring, as they arrive.

    python scripts/fuzz/record.py

Rewrites seeds/prefill, seeds/decode and seeds/announcement.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import managers
import msgspec
from mutate import pack

from sglang_mixkv.core.announcement import announcement

SEEDS = Path(__file__).parent / "seeds"


def keep(side: str, what: str, content: bytes) -> None:
    name = f"{what}-{hashlib.sha256(content).hexdigest()[:8]}"
    (SEEDS / side / name).write_bytes(content)


def listen(name: str, rank: Any) -> None:
    """Keep each message that this rank's manager checks, and all of them in their order."""
    manager, side, seen = rank.manager, rank.side, []
    real = manager._may_pass

    def kept(check: Any, frames: list[bytes]) -> bool:
        seen.append(frames)
        keep(side, f"{name}{rank.rank}-message", pack([frames]))
        if len(seen) == 3:
            keep(side, f"{name}{rank.rank}-messages", pack(seen))
        return real(check, frames)

    manager._may_pass = kept
    if side == "prefill":
        keep("announcement", name, msgspec.json.encode(announcement(manager.facts)))


def main() -> None:
    managers.load()
    ring = importlib.import_module("protocol.ring")
    for side in ("prefill", "decode", "announcement"):
        shutil.rmtree(SEEDS / side, ignore_errors=True)
        (SEEDS / side).mkdir(parents=True)
    for name, case in managers.cases().items():
        case.extra["faults"] = {
            (side, rank): lambda one, name=name: listen(name, one)
            for side in ("prefill", "decode")
            for rank in range(2)
        }
        # Aux data over the control channel, as with NVLink pools.
        os.environ["SGLANG_MOONCAKE_SEND_AUX_TCP"] = str(int(name == "hybrid"))
        outcome = ring.run(case)
        assert outcome.statuses == {"success"}, outcome.wrong
    from sglang.srt.disaggregation.common.conn import AbortAck, AbortNotification

    for abort in (AbortNotification(100), AbortNotification(100, "127.0.0.1", 17009, 1)):
        keep("prefill", "abort", pack([abort.to_zmq()]))
    for ack in (AbortAck(100, 0), AbortAck(100, 1, 1)):
        keep("decode", "ack", pack([ack.to_zmq()]))


if __name__ == "__main__":
    main()
