"""An abort on prefill ends the request on decode, at each stage; what follows is right.

SGLang's timeouts are longer than the ring waits: a request of which decode is not notified is stuck
here. Afterwards the same room number is used again, and then another one.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from rig.faults import GONE, TIMEOUTS, WAITING_S
from rig.model import Cache, Case, Request
from rig.rank import Rank, reason_of, send
from rig.ring import Outcome, ranks_of, run
from rig.special import Special
from rig.stages import Stop, hold_in_decode, hold_in_prefill
from rig.threads import wait_for
from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.engine import notices, rooms
from sglang_mixkv.engine.notices import AbortedRequests
from sglang_mixkv.engine.sender import DraftSender
from sglang_mixkv.series import ABORTED

SHAPES = {
    "MLA 2 to 1": (2, 1, Cache("mla", layers=2, k_bytes=24)),
    "MLA 1 to 2": (1, 2, Cache("mla", layers=2, k_bytes=24)),
    "GQA 2 to 1": (2, 1, Cache("mha", layers=2, heads=2)),
}
HELD = "ready", "reading", "read", "copying"  # of the first chunk's draft KV
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
        elif rank.rank or sender.curr_idx:  # SGLang's ABORT of decode's ends these ranks' half
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
def test_decode_fails_with_prefill(shape: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for of in "WAITING", "BOOTSTRAP":
        monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{of}_TIMEOUT", "90")
    outcome = aborted(shape, stage)
    ended = "success" if stage == "target done" else "failed"
    assert {report.status[0] for report in outcome.decode} == {ended}
    for report in outcome.decode:
        assert [ABORTED in reason for reason in report.reasons] == [True] * (ended == "failed")


@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=pytest.mark.full)])
def test_without_deferred_release_decode_waits(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side: its pages would be another request's while prefill may write to them."""
    for name, seconds in TIMEOUTS.items():
        monkeypatch.setenv(name, seconds)
    off = {(side, 0): lambda _: os.environ.update({DEFERRED: "0"})}
    shape = "MLA 1 to 2" if side == "prefill" else "MLA 2 to 1"  # one rank on that side
    rooms = [100, 101, 102]  # decode's late ABORT would be another request's
    outcome = aborted(shape, "between chunks", before=off, rooms=rooms)
    assert f"timed out after {WAITING_S}." in outcome.reasons


@pytest.mark.transports(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_is_notified_whose_metadata_come_later(shape: str) -> None:
    """Prefill has cleared the room, as its scheduler does, and does not know decode yet."""

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


class Stock:
    def abort(self) -> None:
        self.kv_mgr.did.append("abort")  # type: ignore[attr-defined]


class Sender(DraftSender, Stock):
    """On a manager with two decode ranks, of which one takes no message."""

    def __init__(self) -> None:
        self.bootstrap_room, self.hung, self.sent = 7, Event(), SimpleQueue[str]()
        ranks = {n: SimpleNamespace(endpoint=n, dst_port=1, is_dummy=False) for n in "ab"}
        self.kv_mgr = SimpleNamespace(
            request_status={7: KVPoll.Transferring}, enable_deferred_decode_kv_release=True,
            send_kv_status_message=self.message, transfer_infos={7: ranks}, did=[],
        )  # fmt: skip
        self.kv_mgr.aborted = AbortedRequests(self.kv_mgr)

    def message(self, targets: list[tuple[str, int]], **_: Any) -> None:
        ((name, _),) = targets
        if name == "a":
            self.hung.wait()
        self.sent.put(name)


def test_an_abort_waits_for_no_decode_rank() -> None:
    """SGLang's send blocks for 30 s where one is gone. Its messages take one thread, however many
    there are."""
    sender, before = Sender(), threading.active_count()
    for count in range(1, 9):
        sender.abort()
        assert sender.kv_mgr.did == ["abort"] * count
        assert sender.sent.get(timeout=10) == "b"
    assert threading.active_count() <= before + 2
    sender.hung.set()
    assert [sender.sent.get(timeout=10) for _ in range(8)] == ["a"] * 8


class Use:
    """Of a number, by a sender that SGLang has aborted, or by the one behind it."""

    def __init__(self) -> None:
        self.bootstrap_room, self.cleared = 7, False

    def clear(self) -> None:
        self.cleared = True


HERE, DUMMIES = (
    {7: {"a": SimpleNamespace(endpoint="a", dst_port=1, is_dummy=False)}},
    {7: {"a": SimpleNamespace(endpoint="a", dst_port=1, is_dummy=True)}},
)
NOTED = {"prefixes": {7: 0}, "status": {7: KVPoll.Failed}, "infos": HERE}


@pytest.mark.parametrize(
    ("newest", "tables", "targets", "is_left", "is_cleared"),
    [
        ("own", NOTED, {("a", 1)}, False, False),
        ("none", NOTED, {("a", 1)}, True, True),
        ("another", NOTED, (), True, False),
        ("own", NOTED | {"infos": DUMMIES}, (), False, False),
        ("own", NOTED | {"infos": {}}, (), False, False),
        *((whose, NOTED | {"prefixes": {}}, None, True, False) for whose in ("own", "none")),
        *((whose, NOTED | {"status": {}}, None, True, False) for whose in ("own", "none")),
        ("another", NOTED | {"prefixes": {}}, (), True, False),
    ],
)
def test_an_abort_before_metadata_touches_nothing_of_the_numbers_next_use(
    newest: str, tables: Any, targets: Any, is_left: bool, is_cleared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Metadata that come then are that one's. SGLang's thread notes the prefix, then the status."""
    infos, prefixes, status = (dict(tables[name]) for name in ("infos", "prefixes", "status"))
    sender, another = Use(), Use()
    uses = {"own": {7: sender}, "none": {}, "another": {7: another}}[newest]
    monkeypatch.setattr(rooms, "_uses", uses)
    manager = SimpleNamespace(
        transfer_infos=infos, req_to_decode_prefix_len=prefixes, request_status=status
    )
    before = dict(infos), dict(prefixes), dict(status)
    assert AbortedRequests(manager)._late(sender, 7) == targets
    assert (sender.cleared, another.cleared) == (is_cleared, False)
    assert status == before[2]
    assert (infos, prefixes) == (before[:2] if is_left else ({}, {}))


def test_an_abort_ends_where_its_number_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "LOOK_S", 0.01)
    sender = Sender()
    tables = sender.kv_mgr
    ranks, tables.transfer_infos = tables.transfer_infos, {}
    tables.req_to_decode_prefix_len, another = {}, Use()
    monkeypatch.setattr(rooms, "_uses", {7: sender})
    sender.abort()
    time.sleep(0.1)
    rooms._uses[7] = another
    tables.transfer_infos, tables.req_to_decode_prefix_len = dict(ranks), {7: 4}
    assert wait_for(lambda: not tables.aborted._background.running)
    assert sender.sent.empty()
    assert (tables.transfer_infos, tables.req_to_decode_prefix_len) == (ranks, {7: 4})


@pytest.mark.parametrize(("under_way", "is_sent"), [(-1, True), (0, False), (1, False)])
def test_aborts_beyond_those_that_are_under_way_are_not_sent(under_way: int, is_sent: bool) -> None:
    sender = Sender()
    sender.hung.set()
    running = {Future[Any]() for _ in range(notices.MAX_NOTICES + under_way)}
    sender.kv_mgr.aborted._background.running |= running
    sender.abort()
    if is_sent:
        assert {sender.sent.get(timeout=10) for _ in "ab"} == {"a", "b"}
    assert sender.kv_mgr.did == ["abort"]
    sender.kv_mgr.aborted._background.running -= running
    assert wait_for(lambda: not sender.kv_mgr.aborted._background.running)
    assert sender.sent.empty()


@pytest.mark.parametrize("status", [None, KVPoll.Success, KVPoll.Failed])
def test_nothing_is_sent_for_a_room_that_has_ended(status: Any) -> None:
    sender = Sender()
    sender.hung.set()
    sender.kv_mgr.request_status[7] = status
    sender.abort()
    sender.kv_mgr.request_status[7] = KVPoll.Transferring
    sender.abort()  # which is sent, and first
    assert sender.kv_mgr.did == ["abort"] * 2
    assert {sender.sent.get(timeout=10) for _ in range(2)} == {"a", "b"}
    assert sender.sent.empty()
