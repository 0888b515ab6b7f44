"""After a restore from a snapshot under traffic, requests are served with cold drafters.

Dynamo's snapshots replace SGLang's NIXL manager with one that makes a new agent after a restore.
The stand-ins in these tests do the same between two requests, without a snapshot. The data plane
would still work, so the tests show that the plugin does not use it.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from dataclasses import replace
from typing import Any

import pytest
from rig.ring.logs import keep_lines
from rig.ring.model import Case, Request, draft_bytes
from rig.ring.rank import LIMIT_S, Rank, send
from rig.ring.run import Outcome, ranks_of, run
from rig.ring.special import Special
from sglang.srt.disaggregation import nixl
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver

pytestmark = pytest.mark.parametrize("backend", ["nixl"], indirect=True)

REQUESTS = (Request(23), Request(8), Request(24, chunk_pages=1), Request(12))
WARM = 2  # requests before the restore
FIRST_ROOM = 100


class SnapshotManager(NixlKVManager):  # type: ignore[misc]
    """`former`: the agents before a restore, which SGLang's writes in flight still use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.former: list[Any] = []

    def rebind(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.former.append(self.agent)
        self.agent = nixl_agent(f"{self.agent.name}-restored", nixl_agent_config(backends=["UCX"]))
        self.register_buffer_to_engine()

    def _add_remote_peer(self, peer: Any) -> None:
        """Rebind when a known peer registers again, once SGLang has sent all earlier requests."""
        if peer.agent_name in self.decode_kv_args_table:
            while self.transfer_infos:
                time.sleep(0.001)
            self.rebind()
            self.decode_kv_args_table.clear()
            for name, kept in vars(self).items():  # SGLang's transfers, prepared with the old agent
                if name.startswith(("prep_handle", "_prepared_state_plans")):
                    setattr(self, name, {} if isinstance(kept, dict) else None)
        super()._add_remote_peer(peer)


class SnapshotReceiver(NixlKVReceiver):  # type: ignore[misc]
    """`restored`: the side that is restored. Its peers register again, as with a new process."""

    restored: Any = None
    done: Any = None  # by decode rank

    def init(self, prefill_dp_rank: int) -> None:
        number, rank = self.bootstrap_room - FIRST_ROOM, self.kv_mgr.kv_args.engine_rank
        if (self.restored, number) in (("decode", WARM + 1), ("prefill", WARM)):
            self.kv_mgr.connection_pool.clear()
            if self.restored == "decode":
                self.kv_mgr.rebind()
                self.done[rank].set()
        super().init(prefill_dp_rank)


def no_reads_afterwards(rank: Rank) -> None:
    plane = rank.manager.decode_channel._store.plane
    real = plane._post

    def post(*args: Any) -> None:
        if plane.dead:
            rank.report.wrong.append("a read began after the restore")
        real(*args)

    plane._post = post


def restored(sizes: tuple[int, int], side: str, patch: pytest.MonkeyPatch) -> Outcome:
    """Run two requests, restore all ranks of a side, and run two more. If decode is restored, the
    third request is in flight meanwhile: its last chunk is sent afterwards."""
    done = [mp.get_context("fork").Event() for _ in range(sizes[1])]

    def send_late(rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
        pages = rank.case.pages(REQUESTS[sender.ring_number])
        is_last = sender.curr_idx + len(chunk) == pages
        if side == "decode" and sender.ring_number == WARM and is_last:
            assert all(one.wait(LIMIT_S / 4) for one in done)
        send(rank, sender, chunk, state)

    patch.setattr(SnapshotReceiver, "restored", side)
    patch.setattr(SnapshotReceiver, "done", done)
    patch.setattr(nixl, "NixlKVManager", SnapshotManager)
    patch.setattr(nixl, "NixlKVReceiver", SnapshotReceiver)
    patch.setenv("SGLANG_MIXKV_DATA_PLANE", "nixl")
    case = Case(*sizes, requests=REQUESTS, rounds=((0, 1), (2, 3)))
    watched = {key: no_reads_afterwards for key in ranks_of(case) if key[0] == "decode"}
    logged = dict.fromkeys(ranks_of(case), keep_lines("[MIXKV-"))
    special = Special(faults=watched, send=send_late, before=logged)
    return run(replace(case, special=special))


@pytest.mark.parametrize(
    ("sizes", "side"),
    [
        ((2, 1), "decode"), ((1, 2), "prefill"),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (
            ((2, 1), "prefill"), ((1, 2), "decode"),
        )),
    ],
)  # fmt: skip
def test_a_restored_process_serves_requests_with_cold_drafters(
    sizes: tuple[int, int], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore, no slot is read and no row is packed. Each restored rank logs one line, and
    decode names the prefill server that was restored."""
    outcome = restored(sizes, side, monkeypatch)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}, outcome.reasons
    assert all(report.cold == {2, 3} for report in outcome.decode)
    reason, cold = ("restored" if side == "decode" else "prefill_snapshot"), 2 * sizes[1]
    assert outcome.total("rooms_total", "cold") == cold
    assert outcome.total("rooms_total", "cold", reason) == cold
    assert outcome.total("rooms_total", "warm") == 2 * sizes[1]
    assert outcome.total("unopened_rooms_total") == 0
    refused, at_most = outcome.total("fails_sent_total", "snapshot"), 2 * max(sizes)
    if side == "prefill":  # the first rank's FAIL makes a room cold
        assert cold <= refused <= at_most
        warm = Case(*sizes, requests=REQUESTS[:WARM])
        assert outcome.total("sent_bytes_total") == draft_bytes(warm)
    else:
        assert refused == 0
    lines = outcome.reasons.splitlines()
    agents = [line for line in lines if "expected the NIXL agent" in line]
    assert sorted(line.partition(":")[0] for line in agents) == [
        f"{side} {rank}" for rank in range(sizes[side == "decode"])
    ]
    others = {line.partition(":")[0] for line in lines if line not in agents}
    assert others == {f"decode {rank}" for rank in range(sizes[1] * (side == "prefill"))}
    assert all("MIXKV-PAIR-06" in line and "snapshot" in line for line in lines)
