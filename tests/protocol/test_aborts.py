"""An abort on prefill also fails the request on decode, at every stage of the request.

SGLang's timeouts are longer than the ring waits, so the test fails if decode is not notified of the
abort. Two more requests follow, the first with the same room number, and must be correct.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
from rig.ring.model import Cache, Case, Request
from rig.ring.rank import Rank, reason_of, send
from rig.ring.run import Outcome, ranks_of, run
from rig.ring.special import Special
from rig.ring.timeouts import GONE, TIMEOUTS, WAITING_S
from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.series import ABORTED

from .stages import Stop, hold_in_decode, hold_in_prefill

SHAPES = {
    "MLA 2 to 1": (2, 1, Cache("mla", layers=2, k_bytes=24)),
    "MLA 1 to 2": (1, 2, Cache("mla", layers=2, k_bytes=24)),
    "GQA 2 to 1": (2, 1, Cache("mha", layers=2, heads=2)),
}
HELD = "ready", "reading", "read", "copying"  # stages of the first chunk's draft KV
CHUNKS = {"before the first chunk": 0, "between chunks": 1, "target done": 3}
DEFERRED = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"


def aborted(shape: str, stage: str, **special: Any) -> Outcome:
    stop = Stop(mp.get_context("fork"))

    def hold(rank: Rank) -> None:
        if rank.side == "decode":
            hold_in_decode(rank.manager.decode_channel, stop, lambda _: True)
        else:
            hold_in_prefill(rank.manager.prefill_channel, stop, lambda _: True)

    def send_or_abort(rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
        if sender.ring_number:
            send(rank, sender, chunk, state)
        elif stage in CHUNKS:
            if sender.curr_idx == CHUNKS[stage]:
                sender.abort()
                return
            send(rank, sender, chunk, state)
            if sender.curr_idx == CHUNKS[stage] == 3:
                while KVPoll.Failed < rank.manager.request_status[100] < KVPoll.Success:
                    time.sleep(0.001)
                sender.abort()
        elif rank.rank or sender.curr_idx:  # decode's ABORT message ends the request on these ranks
            send(rank, sender, chunk, state)
        else:
            acts = Thread(target=stop.act, args=(stage, sender.abort))
            acts.start()
            while stop._stage.value < 0:
                time.sleep(0.001)
            send(rank, sender, chunk, state)
            acts.join()

    prefill, decode, target = SHAPES[shape]
    requests = Request(12, chunk_pages=1), Request(9), Request(11, chunk_pages=1)
    case = Case(prefill, decode, target, requests=requests, rounds=((0,), (1,), (2,)))
    faults = dict.fromkeys(ranks_of(case), hold) if stage in HELD else {}
    more = {"faults": faults, "send": send_or_abort, "rooms": [100, 100, 101], **special}
    outcome = run(replace(case, special=Special(pause=1, **more)))
    assert [w for w in outcome.wrong if not any(name in w for name in GONE)] == []
    assert all(report.status[1:] == ["success"] * 2 for report in outcome.decode)
    assert all(2 not in report.cold for report in outcome.decode)
    return outcome


@pytest.mark.transports(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", [*CHUNKS, *HELD])
def test_an_abort_on_prefill_fails_the_request_on_decode(
    shape: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for of in "WAITING", "BOOTSTRAP":
        monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{of}_TIMEOUT", "90")
    outcome = aborted(shape, stage)
    ended = "success" if stage == "target done" else "failed"
    assert {report.status[0] for report in outcome.decode} == {ended}
    for report in outcome.decode:
        assert [ABORTED in reason for reason in report.reasons] == [True] * (ended == "failed")


@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=pytest.mark.full)])
def test_without_deferred_release_decode_waits(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without deferred release on either side, decode waits for SGLang's timeout. Otherwise decode
    would reuse the request's pages while prefill may still write to them."""
    for name, seconds in TIMEOUTS.items():
        monkeypatch.setenv(name, seconds)
    off = {(side, 0): lambda _: os.environ.update({DEFERRED: "0"})}
    shape = "MLA 1 to 2" if side == "prefill" else "MLA 2 to 1"  # one rank on that side
    rooms = [100, 101, 102]  # decode's late ABORT would end a second request with this number
    outcome = aborted(shape, "between chunks", before=off, rooms=rooms)
    assert f"timed out after {WAITING_S}." in outcome.reasons


@pytest.mark.transports(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_is_notified_when_its_metadata_arrive_late(shape: str) -> None:
    """Decode's metadata arrive after prefill has aborted and cleared the room. Prefill learns
    decode's address only from the metadata."""

    def first(rank: Rank) -> None:
        name = "_sender" if rank.side == "prefill" else "_receiver"
        real = getattr(rank, name)

        def make(number: int, *args: Any) -> Any:
            made = real(number, *args)
            if number == 0 and rank.side == "prefill":
                made.abort()
                assert reason_of(made)
            elif number == 0:
                time.sleep(1)
            return made

        setattr(rank, name, make)

    prefill, decode, target = SHAPES[shape]
    case = Case(prefill, decode, target, rounds=((0,), (1,)))
    faults = dict.fromkeys(ranks_of(case), first)
    outcome = run(replace(case, special=Special(faults=faults)))
    assert [w for w in outcome.wrong if not any(name in w for name in GONE)] == []
    for report in outcome.decode:
        assert report.status == ["failed", "success"]
        assert ABORTED in report.reasons[0]
