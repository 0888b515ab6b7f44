"""SGLang's own messages that end the other side's half of a request: who is sent one, and when."""

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
    """A sender on a manager with two decode ranks, one of which takes no message."""

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
    """A sender of one room number, which SGLang has aborted, or which uses the number next."""

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
def test_an_abort_before_metadata_spares_the_numbers_next_use(
    newest: str, tables: Any, targets: Any, is_left: bool, is_cleared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Metadata that arrive later belong to the next use. SGLang's thread records the prefix, then
    the status."""
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


def test_an_abort_ends_where_its_number_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_abort_after_metadata_waits_for_no_more(
    waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode ranks that get nothing from this rank are not notified, and if there is no other,
    nobody is."""
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


@pytest.mark.parametrize("status", [None, KVPoll.Success, KVPoll.Failed, KVPoll.Transferring])
def test_no_abort_is_sent_if_decode_would_free_pages_in_use(
    status: Any,
) -> None:
    """Decode frees pages at once if it does not defer their release, while prefill may still write
    to them. Nothing is sent for a room that has ended, either."""
    sender = Sender()
    sender.hung.set()
    sender.kv_mgr.request_status[7] = status
    sender.kv_mgr.enable_deferred_decode_kv_release = status != KVPoll.Transferring
    sender.abort()
    sender.kv_mgr.request_status[7] = KVPoll.Transferring
    sender.kv_mgr.enable_deferred_decode_kv_release = True
    sender.abort()  # which is sent, and first
    assert sender.kv_mgr.did == ["abort"] * 2
    assert {sender.sent.get(timeout=10) for _ in range(2)} == {"a", "b"}
    assert sender.sent.empty()


class Receiver:
    """The part of a refused request that notifies prefill, once, as SGLang's receiver does."""

    def __init__(self) -> None:
        self.told, self.abort_notified = list[str](), True  # by `_fail`, before its ranks are known

    def ensure_abort_notified(self) -> None:
        if not self.abort_notified:
            self.abort_notified = True
            self.told.append("abort")


@pytest.mark.parametrize(("under_way", "is_sent"), [(-1, True), (0, False), (1, False)])
def test_refused_requests_beyond_the_bound_are_not_aborted(
    under_way: int, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "PAUSES_S", (0.0, 0.0))
    background, receiver = Background("mixkv-test", 1), Receiver()
    refused = RefusedRequests(background)
    refused._under_way = before = notices.MAX_NOTICES + under_way
    refused.add([], receiver)
    assert wait_for(lambda: not background.running)
    assert (len(receiver.told), refused._under_way) == (2 * is_sent, before)


def test_notices_are_bounded_and_last_as_long_as_sglang_waits() -> None:
    """The first ABORT of a refused request follows decode's own answer; later ones reach a prefill
    rank that accepts the request late."""
    assert (notices.MAX_NOTICES, aborts.BLOCKED_AT_ONCE) == (4096, 256)
    assert (aborts.POLL_S, aborts.LATE_S, notices.LINGER_MS) == (1.0, 300.0, 1000)
    assert notices.PAUSES_S == (0.2, 0.5, 1.3, 6.0)
