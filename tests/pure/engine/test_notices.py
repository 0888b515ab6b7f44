"""The aborts that a rank sends to the other side in SGLang's own messages."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from rig.channel.threads import wait_for
from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.background import Background
from sglang_mixkv.engine import notices
from sglang_mixkv.engine.notices import RefusedRequests
from sglang_mixkv.engine.sender import DraftSender
from sglang_mixkv.guards import aborts
from sglang_mixkv.guards.aborts import AbortedRequests


class Stock:
    def abort(self) -> None:
        self.kv_mgr.did.append("abort")  # type: ignore[attr-defined]


class Sender(DraftSender, Stock):
    """A sender on a manager with two decode ranks. A send to the first rank blocks."""

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


def test_an_abort_does_not_wait_for_decode_ranks() -> None:
    """An abort does not wait for a decode rank that is gone, where SGLang's send blocks for 30 s.

    All messages to this rank together block only one thread.
    """
    sender, before = Sender(), threading.active_count()
    for count in range(1, 9):
        sender.abort()
        assert sender.kv_mgr.did == ["abort"] * count
        assert sender.sent.get(timeout=10) == "b"
    assert threading.active_count() <= before + 2
    sender.hung.set()
    assert [sender.sent.get(timeout=10) for _ in range(8)] == ["a"] * 8


class Use:
    """A sender of a room number, either the aborted one or the next one with the same number."""

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
def test_an_abort_before_metadata_spares_the_next_request(
    newest: str, tables: Any, targets: Any, is_left: bool, is_cleared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An abort removes late metadata only if no other request has taken its room number.

    Otherwise the metadata belong to the next request. SGLang's thread records the prefix before it
    sets the status.
    """
    infos, prefixes, status = (dict(tables[name]) for name in ("infos", "prefixes", "status"))
    sender, another = Use(), Use()
    uses = {"own": {7: sender}, "none": {}, "another": {7: another}}[newest]
    monkeypatch.setattr(aborts, "newest", uses)
    manager = SimpleNamespace(
        transfer_infos=infos, req_to_decode_prefix_len=prefixes, request_status=status
    )
    before = dict(infos), dict(prefixes), dict(status)
    assert AbortedRequests(manager)._late(sender, 7) == targets
    assert (sender.cleared, another.cleared) == (is_cleared, False)
    assert status == before[2]
    assert (infos, prefixes) == (before[:2] if is_left else ({}, {}))


def test_an_abort_whose_metadata_never_arrive_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an abort ends after SGLang's timeout, when decode no longer waits. None is sent."""
    monkeypatch.setattr(aborts, "POLL_S", 0.01)
    monkeypatch.setattr(aborts, "LATE_S", 0.1)
    sender = Sender()
    sender.kv_mgr.transfer_infos, sender.kv_mgr.req_to_decode_prefix_len = {}, {}
    began, running = time.monotonic(), sender.kv_mgr.aborted._background.running
    sender.abort()
    assert len(running) == 1
    assert wait_for(lambda: not running)
    assert time.monotonic() - began >= 0.1
    assert sender.sent.empty()


def test_an_abort_ends_when_its_room_number_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts, "POLL_S", 0.01)
    sender = Sender()
    tables = sender.kv_mgr
    ranks, tables.transfer_infos = tables.transfer_infos, {}
    tables.req_to_decode_prefix_len, another = {}, Use()
    monkeypatch.setattr(aborts, "newest", uses := {7: sender})
    sender.abort()
    time.sleep(0.1)
    uses[7] = another
    tables.transfer_infos, tables.req_to_decode_prefix_len = dict(ranks), {7: 4}
    assert wait_for(lambda: not tables.aborted._background.running)
    assert sender.sent.empty()
    assert (tables.transfer_infos, tables.req_to_decode_prefix_len) == (ranks, {7: 4})


@pytest.mark.parametrize("waits", ["a", "b", ""])
def test_an_abort_after_metadata_is_sent_at_once(
    waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort after the metadata is sent at once, and only to decode ranks that read this rank."""
    monkeypatch.setattr(aborts, "POLL_S", 600.0)
    sender = Sender()
    sender.hung.set()
    infos = sender.kv_mgr.transfer_infos[7]
    for name, one in infos.items():
        one.is_dummy = name != waits
    sender.abort()
    assert wait_for(lambda: not sender.kv_mgr.aborted._background.running)
    assert [sender.sent.get() for _ in range(sender.sent.qsize())] == list(waits)
    assert sender.kv_mgr.transfer_infos == {7: infos}


@pytest.mark.parametrize(("under_way", "is_sent"), [(-1, True), (0, False), (1, False)])
def test_aborts_beyond_the_limit_are_not_sent(under_way: int, is_sent: bool) -> None:
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


@pytest.mark.parametrize("status", [None, KVPoll.Success, KVPoll.Failed, KVPoll.Transferring])
def test_no_abort_is_sent_if_decode_would_free_pages_in_use(
    status: Any,
) -> None:
    """No abort is sent if decode does not defer the release of pages, or if the room has ended.

    Decode would free the pages at once, while prefill may still write to them.
    """
    sender = Sender()
    sender.hung.set()
    sender.kv_mgr.request_status[7] = status
    sender.kv_mgr.enable_deferred_decode_kv_release = status != KVPoll.Transferring
    sender.abort()
    sender.kv_mgr.request_status[7] = KVPoll.Transferring
    sender.kv_mgr.enable_deferred_decode_kv_release = True
    sender.abort()  # only this abort is sent
    assert sender.kv_mgr.did == ["abort"] * 2
    assert wait_for(lambda: not sender.kv_mgr.aborted._background.running)
    assert sorted(sender.sent.get() for _ in range(sender.sent.qsize())) == ["a", "b"]


class Receiver:
    """The part of a refused request that notifies prefill, once, as SGLang's receiver does."""

    def __init__(self) -> None:
        # `_fail` has set `abort_notified` before the ranks are known
        self.notified, self.abort_notified = list[str](), True

    def ensure_abort_notified(self) -> None:
        if not self.abort_notified:
            self.abort_notified = True
            self.notified.append("abort")


@pytest.mark.parametrize(("under_way", "is_sent"), [(-1, True), (0, False), (1, False)])
def test_refused_requests_beyond_the_limit_are_not_aborted(
    under_way: int, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "PAUSES_S", (0.0, 0.0))
    background, receiver = Background("mixkv-test", 1), Receiver()
    refused = RefusedRequests(background)
    refused._under_way = before = notices.MAX_NOTICES + under_way
    refused.add([], receiver)
    assert wait_for(lambda: not background.running)
    assert (len(receiver.notified), refused._under_way) == (2 * is_sent, before)


def test_limits_and_pauses_of_aborts() -> None:
    """The limits and the pauses of aborts are as intended.

    The first abort of a refused request comes after decode's own answer. Later aborts reach a
    prefill rank that accepts the request late.
    """
    assert (notices.MAX_NOTICES, aborts.BLOCKED_AT_ONCE) == (4096, 256)
    assert (aborts.POLL_S, aborts.LATE_S, notices.LINGER_MS) == (1.0, 300.0, 1000)
    assert notices.PAUSES_S == (0.2, 0.5, 1.3, 6.0)
