"""Test the calls between SGLang's classes and the channel, and their order, without a ring.

`Stock` stands in for SGLang's sender or receiver. A MagicMock as the manager records its calls and
those of the manager's attributes in one list.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.decode.actions import State
from sglang_mixkv.decode.plan import Plan
from sglang_mixkv.engine import pool_hooks, receiver, sender
from sglang_mixkv.engine.draft_pool import Draft
from sglang_mixkv.engine.manager import DraftManager, mixed
from sglang_mixkv.engine.receiver import DraftReceiver
from sglang_mixkv.engine.sender import DraftSender
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.guards.room_reuse import newest

NUMBERS = itertools.count(1 << 40)
PAGE, OTHER_PAGE = 4, 16  # the page sizes of drafter and target
STATUSES = [KVPoll.Failed, KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Transferring]


class Stock:
    conclude_state: Any = None
    bootstrap_infos: Any = None

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_addr = mgr, bootstrap_addr
        self.bootstrap_room = bootstrap_room


def stocks(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.kv_mgr.stock, name)(*args, **kwargs)


METHODS = ("init", "send", "send_metadata", "poll", "clear", "abort", "pop_decode_prefix_len")
for _name in (*METHODS, "ensure_abort_notified"):
    setattr(Stock, _name, stocks(_name))


def use(mixin: type, **local: Any) -> tuple[Any, Any]:
    """Make a sender or receiver with this mixin, and its manager."""
    manager = MagicMock(pp_size=1)
    manager.kv_args.page_size = OTHER_PAGE
    draft = SimpleNamespace(page_size=PAGE, in_reach=lambda first, pages: (first, pages))
    queue = SimpleNamespace(scheduler="the scheduler")
    given = {"draft": draft, "pool_context": queue, "mode": "prefill"}
    manager.local = SimpleNamespace(**given | local)
    return type("Use", (mixin, Stock), {})(manager, "10.0.0.1:8998", next(NUMBERS)), manager


def calls(manager: Any, *names: str) -> list[Any]:
    """Return the recorded calls of these names, in order."""
    return [one for one in manager.mock_calls if one[0] in names]


def rows_of(pages: Any, size: int) -> list[int]:
    return [page * size + row for page in pages for row in range(size)]


# ---------------------------------------------------------------- prefill


def test_a_sender_begins_its_room_once_if_there_is_a_drafter() -> None:
    one, manager = use(DraftSender)
    for _ in range(2):  # SGLang calls init again after a retraction
        one.init(7, "more", aux=1)
    assert calls(manager, "stock.init") == [call.stock.init(7, "more", aux=1)] * 2
    assert calls(manager, "prefill_channel.begin") == [
        call.prefill_channel.begin(one.bootstrap_room)
    ]
    assert one.handle is manager.prefill_channel.begin.return_value
    one, manager = use(DraftSender)
    manager.prefill_channel = None
    manager.stock.poll.return_value = KVPoll.Success
    one.init(7)
    one.send("pages", "state", num_kv_tokens=1)
    assert manager.stock.send.call_args == call("pages", "state", num_kv_tokens=1)
    assert one.poll() == KVPoll.Success
    one.clear()
    one.abort()
    assert [one[0] for one in manager.mock_calls] == [
        "stock.init", "stock.send", "stock.poll", "stock.clear", "aborted.add", "stock.abort"
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_the_tokens_that_sglang_sends(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has the events that SGLang waits for, and its tokens follow those of the previous
    chunk, beginning after decode's prefix. The chunk with the last page is marked as the last."""
    drawn, expected = random.Random(seed), list[Any]()
    one, manager = use(DraftSender)
    manager.pp_size = drawn.choice([1, 2])
    monkeypatch.setattr(sender, "forward_event", lambda of: f"forward of {of}")
    counts = [drawn.randint(0, 3) for _ in range(drawn.randint(1, 5))] + [1]
    one.init(sum(counts))
    first = drawn.choice([0, 8])
    if first:
        manager.stock.pop_decode_prefix_len.return_value = np.int32(first)
        assert one.pop_decode_prefix_len() == first
    at = 0
    for number, count in enumerate(counts):
        pages, early, indices = list(range(at, at + count)), *drawn.choices([None, "event"], k=2)
        tokens = drawn.choice([None, 0, max(0, count * PAGE - 1)])
        one._early_send_wait_event = early and f"early {number}"
        given = {"indices_event": indices, "num_kv_tokens": tokens, "more": number}

        def takes_it_away(
            *_: Any, _early: str | None = one._early_send_wait_event, **__: Any
        ) -> None:
            assert manager.early == _early, "NIXL's queue reads the chunk's event here"
            one._early_send_wait_event = None

        manager.stock.send.side_effect = takes_it_away
        one.send(pages, "state", **given)
        assert manager.stock.send.call_args == call(pages, "state", **given)
        events = [early and f"early {number}", indices]
        events += ["forward of the scheduler"] if manager.pp_size > 1 else []
        sent = count * PAGE if tokens is None else tokens
        at += count
        rows = rows_of(pages, PAGE)
        expected.append((first, sent, at == sum(counts), rows, [e for e in events if e]))
        first += sent
    found = [args for _, args, _ in calls(manager, "prefill_channel.add_chunk")]
    assert all(handle is one.handle for handle, *_ in found)
    assert [
        (*numbers, list(chunk.rows(0, PAGE * count)), list(chunk.events))
        for (_, *numbers, chunk), count in zip(found, counts, strict=True)
    ] == expected
    order = [one[0] for one in calls(manager, "stock.send", "prefill_channel.add_chunk")]
    assert order == ["stock.send", "prefill_channel.add_chunk"] * len(counts)


def test_a_chunk_that_the_channel_rejects_still_reaches_sglang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, manager = use(DraftSender)
    one.init(1)
    manager.prefill_channel.add_chunk.side_effect = ZeroDivisionError
    one.send([0])
    assert caplog.text.count("MIXKV-SELF-01") == 1
    manager.stock.send.side_effect = KeyError  # SGLang's own error is raised
    with pytest.raises(KeyError):
        one.send([0])


@pytest.mark.parametrize("released", [True, False])
def test_only_a_senders_success_waits_for_the_channel(released: bool) -> None:
    one, manager = use(DraftSender)
    one.init(1)
    manager.prefill_channel.release.return_value = released
    for status in STATUSES:
        manager.stock.poll.return_value = status
        assert one.poll() == status
    assert not calls(manager, "prefill_channel.release")
    manager.stock.poll.return_value = KVPoll.Success
    assert one.poll() == (KVPoll.Success if released else KVPoll.Transferring)
    assert calls(manager, "prefill_channel.release") == [call.prefill_channel.release(one.handle)]


@pytest.mark.parametrize(
    ("state", "does", "reason"),
    [
        (None, "clear", ""),
        (KVPoll.Success, "clear", ""),
        (KVPoll.Failed, "clear", "failed on prefill"),
        (None, "abort", "aborted on prefill"),
    ],
)
def test_the_channel_ends_a_room_before_sglang_frees_its_pages(
    state: Any, does: str, reason: str
) -> None:
    """The channel ends the room before SGLang frees the pages. After an abort, decode is notified
    before SGLang forgets its ranks."""
    one, manager = use(DraftSender)
    one.init(1)
    one.conclude_state, ends = state, call.prefill_channel.end(one.handle, reason)
    getattr(one, does)()
    aborted = [call.aborted.add(one)] if does == "abort" else []
    assert manager.mock_calls[2:] == [ends, *aborted, getattr(call.stock, does)()]


def test_an_abort_completes_if_decode_cannot_be_notified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, manager = use(DraftSender)
    manager.aborted.add.side_effect = ZeroDivisionError
    one.abort()
    assert calls(manager, "stock.abort")
    assert caplog.text.count("MIXKV-SELF-01") == 1


# ---------------------------------------------------------------- decode

PLAN = Plan(("a", "b"), 9, "another drafter")  # type: ignore[arg-type]


def opening(**local: Any) -> tuple[Any, Any]:
    """Make a receiver that has a plan, from a server that is not refused."""
    one, manager = use(DraftReceiver, **{"mode": "decode"} | local)
    manager.servers.refuse.return_value = ""
    manager.servers.plan.return_value = PLAN
    one.bootstrap_infos = ["info"]
    one.init(3)
    return one, manager


def failed(one: Any, manager: Any, reason: str) -> bool:
    """Return True if the request has failed for this reason. The failure must be recorded in
    SGLang, set as the request's state, and then sent to prefill."""
    record = call.record_failure(one.bootstrap_room, f"sglang-mixkv: {reason}")
    found = calls(manager, "record_failure", "stock.ensure_abort_notified")
    if not found:
        assert one.conclude_state != KVPoll.Failed
        return False
    assert found == [record, call.stock.ensure_abort_notified()]
    assert one.conclude_state == KVPoll.Failed
    return True


def test_a_receiver_gets_its_plan_when_it_is_initialized() -> None:
    one, manager = opening()
    address = one.bootstrap_addr
    assert manager.mock_calls == [
        call.servers.refuse(address, one), call.stock.init(3),
        call.servers.plan(address, ["info"], one),
    ]  # fmt: skip
    assert one.plan is PLAN
    assert not failed(one, manager, "")


@pytest.mark.parametrize("infos", [None, [], ["info"]])
@pytest.mark.parametrize("concluded", ["before", "by SGLang", None])
def test_a_request_that_sglang_has_ended_is_left_alone(concluded: str | None, infos: Any) -> None:
    one, manager = use(DraftReceiver, mode="decode")
    manager.servers.refuse.return_value, one.bootstrap_infos = "", infos
    if concluded == "before":
        one.conclude_state, manager.servers.refuse.return_value = KVPoll.Failed, "a reason"

    def ends(_: int) -> None:
        one.conclude_state = KVPoll.Failed if concluded else None

    manager.stock.init.side_effect = ends
    one.init(3)
    assert calls(manager, "stock.init") == [call.stock.init(3)]
    assert (one.plan is not None) == (concluded is None and bool(infos))
    assert not calls(manager, "record_failure")
    one.plan = one.plan or (PLAN if concluded else None)
    one.send_metadata([1], 2)
    assert calls(manager, "stock.send_metadata") == [call.stock.send_metadata([1], 2)]
    assert bool(calls(manager, "decode_channel.open")) == (concluded is None and bool(infos))


@pytest.mark.parametrize("refused", [True, False])
def test_a_request_to_a_refused_server_or_without_a_plan_fails(refused: bool) -> None:
    error = MixKVError("MIXKV-PAIR-01", "why")
    one, manager = use(DraftReceiver, mode="decode")
    one.bootstrap_infos = ["info"]
    manager.servers.refuse.return_value = "why" if refused else ""
    manager.servers.plan.side_effect = error
    one.init(3)
    assert failed(one, manager, "why" if refused else str(error))
    assert bool(calls(manager, "stock.init")) == (not refused)


@pytest.mark.parametrize("given", ["by name", "by place", "nothing", "None", "0"])
@pytest.mark.parametrize("drafting", [True, False])
def test_a_room_is_opened_after_sglangs_metadata(
    drafting: bool, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a drafter opens the room with an empty token range."""
    monkeypatch.setattr(receiver, "forward_event", lambda of: f"forward of {of}")
    draft = Draft(None, None, PAGE, window=2 * PAGE) if drafting else None  # type: ignore[arg-type]
    one, manager = opening(draft=draft)
    first, pages = {"by name": 8, "by place": 8}.get(given, 0), np.array([5, 3, 7, 4])
    args: tuple[Any, ...] = (1, [2], first) if given == "by place" else (1, [2])
    kwargs = {"decode_prefix_len": {"None": None}.get(given, first)}
    kwargs = {"more": 1} | (kwargs if given in ("by name", "None", "0") else {})
    one.send_metadata(pages, *args, **kwargs)
    opened = calls(manager, "stock.send_metadata", "decode_channel.open")
    assert [name for name, *_ in opened] == ["stock.send_metadata", "decode_channel.open"]
    assert opened[0] == call.stock.send_metadata(pages, *args, **kwargs)
    ((handle,), found) = opened[1].args, opened[1].kwargs
    begins = first + PAGE * (len(pages) - 3) if drafting else first
    size = PAGE if drafting else OTHER_PAGE
    assert found == {
        "bootstrap_room": one.bootstrap_room, "sources": PLAN.sources, "first_token": begins,
        "end": begins + (3 * PAGE if drafting else 0), "cold": PLAN.cold, "version": 9,
    }  # fmt: skip
    assert one.handle is handle
    assert handle.pages.page_size == size
    assert (handle.event, handle.prefill) == ("forward of the scheduler", one.bootstrap_addr)
    written = pages[1:] if drafting else pages
    assert list(handle.pages.rows(0, size * len(written))) == rows_of(written, size)


def test_a_room_that_cannot_be_opened_fails_only_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, manager = opening()
    manager.decode_channel.open.side_effect = ZeroDivisionError("why")
    one.send_metadata([1])
    assert one.handle is None, "a room that was not opened must not be closed"
    text = "[MIXKV-SELF-01] its room could not be opened: ZeroDivisionError('why')"
    assert failed(one, manager, text)
    assert "[MIXKV-SELF-01]" in caplog.text


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("state", [None, *State])
def test_only_a_receivers_success_waits_for_the_channel(state: State | None, lost: bool) -> None:
    one, manager = opening()
    manager.stock.poll.return_value = KVPoll.Success
    assert one.poll() == KVPoll.Success, "no room is open yet"
    one.send_metadata([1])
    channel, one.handle.state, one.handle.reason = manager.decode_channel, state, "why"
    channel.is_lost.return_value = lost
    for status in STATUSES:
        manager.stock.poll.return_value = status
        assert one.poll() == status
    assert not channel.target_arrived.mock_calls
    manager.stock.poll.return_value = KVPoll.Success
    expected = {None: KVPoll.Transferring, State.FAILED: KVPoll.Failed}
    assert one.poll() == expected.get(state, KVPoll.Success)
    assert channel.target_arrived.mock_calls == [call(one.handle)]
    assert channel.clear_now.mock_calls == [call(one.handle)] * (state is None and lost)
    text = "[MIXKV-SELF-01] draft rows could not be cleared: why"
    assert failed(one, manager, text) == (state is State.FAILED)


def test_a_rooms_gate_is_closed_before_sglang_frees_its_pages() -> None:
    one, manager = opening()
    one.clear()
    one.send_metadata([1])
    one.clear()
    names = [name for name, *_ in calls(manager, "decode_channel.close", "stock.clear")]
    assert names == ["stock.clear", "decode_channel.close", "stock.clear"]


@pytest.mark.parametrize(
    ("state", "records", "reason"),
    [
        (None, {}, ""), (KVPoll.Success, {}, ""), (None, {0: "of an earlier one"}, ""),
        (KVPoll.Failed, {0: "of its own"}, "of its own"),
        (KVPoll.Failed, {1: "of another room"}, "failed on another rank"),
    ],
)  # fmt: skip
def test_a_room_that_failed_is_closed_with_a_reason(
    state: Any, records: dict[int, str], reason: str
) -> None:
    """A failed room is closed with a reason even if this rank recorded none, since it would
    otherwise count as warm or cold. `records`: failure reasons, by the offset of their room
    number."""
    one, manager = opening()
    one.send_metadata([2, 3])
    manager.failure_records = {one.bootstrap_room + by: text for by, text in records.items()}
    one.conclude_state = state
    one.clear()
    found = calls(manager, "decode_channel.close")
    assert found == [call.decode_channel.close(one.handle, reason)]


# ---------------------------------------------------------------- room numbers


def second(first: Any, manager: Any, number: Any = None) -> Any:
    return type(first)(manager, "10.0.0.2:8998", first.bootstrap_room if number is None else number)


def refused(manager: Any, again: Any, got: str) -> bool:
    """Return True if the request failed on creation, and got an unused negative room number."""
    if again.conclude_state is None:
        assert not manager.request_status
        assert not calls(manager, "record_failure", "local.reporter")
        return False
    number = again.bootstrap_room
    assert number < 0
    assert manager.request_status == {number: KVPoll.Failed}
    assert again.conclude_state == KVPoll.Failed
    ((given, text),) = [one.args for one in calls(manager, "record_failure")]
    assert given == number
    assert text.startswith("[MIXKV-PAIR-09]")
    assert f"got {got}" in text
    return True


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("mixin", [DraftSender, DraftReceiver])
def test_only_the_second_use_of_a_number_fails(mixin: type, mode: str) -> None:
    """Only decode counts the failed use. Another manager may use the same number independently."""
    reporter = MagicMock()
    first, manager = use(mixin, mode=mode, reporter=reporter)
    manager.request_status, room = {}, first.bootstrap_room
    manager.stock.poll.return_value = KVPoll.Transferring
    assert refused(manager, second(first, manager), str(room))
    notes = [(note.what, note.peer) for (note,) in (one.args for one in reporter.mock_calls)]
    assert notes == ([("reused", b"")] if mode == "decode" else [])
    assert first.conclude_state is None
    assert newest.get(room) is first
    _, other = use(mixin, mode=mode)
    other.request_status = {}
    third = second(first, other)
    assert not refused(other, third, "")
    assert third.bootstrap_room == room


@pytest.mark.parametrize("mixin", [DraftSender, DraftReceiver])
def test_a_number_is_free_once_its_use_is_cleared(mixin: type) -> None:
    first, manager = use(mixin)
    manager.request_status = {}
    manager.stock.poll.return_value = KVPoll.Transferring
    first.clear()
    assert newest.get(first.bootstrap_room) is None
    third = second(first, manager)
    assert not refused(manager, third, "")
    first.clear()
    assert len(calls(manager, "stock.clear")) == 1, "a second clear would clear the next use"
    assert newest.get(first.bootstrap_room) is third


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("mixin", [DraftSender, DraftReceiver])
@pytest.mark.parametrize("status", [*STATUSES, KVPoll.Success])
def test_a_sender_that_has_succeeded_frees_its_number(
    mixin: type, status: Any, is_packed: bool
) -> None:
    """Decode may resend a retracted request while its first sender is still packing. That sender
    gets a new room number, under which it completes."""
    first, manager = use(mixin)
    room = first.bootstrap_room
    if mixin is DraftSender:
        first.init(1)
    manager.prefill_channel.release.return_value = is_packed
    manager.request_status, manager.stock.poll.return_value = {room: status}, status
    manager.transfer_infos = manager.req_to_decode_prefix_len = {}
    again = second(first, manager)
    leaves = mixin is DraftSender and status == KVPoll.Success
    assert (again.bootstrap_room == room) == leaves == (newest.get(room) is again)
    assert (first.bootstrap_room < 0) == leaves
    if leaves:
        assert manager.request_status == {first.bootstrap_room: status}
        assert first.poll() == (status if is_packed else KVPoll.Transferring)


@pytest.mark.parametrize("number", [-1, 1 << 63, True, 1.0, "7", None])
def test_an_invalid_number_fails_at_the_start_of_its_use(number: Any) -> None:
    manager = MagicMock(request_status={}, local=SimpleNamespace(mode="prefill"))
    again = type("Use", (DraftSender, Stock), {})(manager, "h:1", number)
    assert refused(manager, again, "none" if number is None else type(number).__name__)


# ---------------------------------------------------------------- around SGLang's queues


def test_the_pool_context_belongs_to_one_thread() -> None:
    """The pool context contains the innermost pool, and is visible only in the thread that builds
    the manager. The hook returns SGLang's manager unchanged."""
    taken = list[Any]()
    inner = SimpleNamespace(k_buffer=[], v_buffer=[])
    queue = SimpleNamespace(
        draft_token_to_kv_pool=SimpleNamespace(full_kv_pool=inner),
        scheduler=SimpleNamespace(),
    )

    args = SimpleNamespace(kv_data_ptrs=[], state_data_ptrs=[])
    built = SimpleNamespace(kv_args=args, local=None)

    def builds(_: Any) -> Any:
        taken.append(pool_hooks.current())
        other = threading.Thread(target=lambda: taken.append(pool_hooks.current()))
        other.start()
        other.join()
        return built

    assert pool_hooks.around_init(builds, queue) is built
    assert taken == [(inner, queue.scheduler), (None, None)]


def test_another_projects_manager_stays_below_the_mixin() -> None:
    """Dynamo's checkpoint code replaces `get_kv_class` like this before plugins are loaded. A
    wrapper that is loaded after the plugins is refused (test_draft_pool.py)."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    snapshot = type("SnapshotNixlKVManager", (NixlKVManager,), {"restored": lambda self: "theirs"})
    found = mixed(snapshot, "nixl", "manager")
    order = [one.__name__ for one in found.__mro__]
    assert order.index("DraftManager") < order.index(snapshot.__name__)
    assert order.index(snapshot.__name__) < order.index("NixlKVManager")
    assert found.restored is snapshot.restored


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_new_agent_means_that_the_process_was_restored(side: str) -> None:
    """SGLang may register its memory again with the same agent; managers of other backends have no
    agent. A snapshot's manager may make its agent when it is read."""
    registered = MagicMock()
    stock = type("Stock", (), {"register_buffer_to_engine": lambda self: registered(self.agent)})
    snapshot = type("Snapshot", (stock,), {"agent": property(lambda self: self.made)})
    manager: Any = type("Use", (DraftManager, snapshot), {})
    one = manager.__new__(manager)
    one.local, one.made = SimpleNamespace(mode=side), "first"
    one.register_buffer_to_engine()  # in its constructor, before the channel exists
    channel = MagicMock()
    setattr(one, f"{side}_channel", channel)
    one.register_buffer_to_engine()
    assert channel.mock_calls == []
    one.made = "second"
    one.register_buffer_to_engine()
    one.register_buffer_to_engine()
    assert channel.mock_calls == [call.restored()]
    assert registered.mock_calls == [call("first"), call("first"), call("second"), call("second")]


def test_hooks_pass_sglangs_arguments_and_results_through() -> None:
    original = MagicMock(return_value=None)
    context = pool_hooks.DraftPoolContext(None, None)
    local = SimpleNamespace(reporter=MagicMock(), pool_context=context)
    queue = SimpleNamespace(kv_manager=SimpleNamespace(local=local))
    assert pool_hooks.around_resume(original, queue, 1, at_most=2) is None
    assert original.mock_calls == [call(queue, 1, at_most=2)]
    assert pool_hooks.around_resume(lambda *_: ["request"], queue) == ["request"]
    assert local.reporter.mock_calls == [call.retracted("request")], "counted even without a pool"

    order, handles = list[Any](), [SimpleNamespace(), None, SimpleNamespace()]
    many = [
        SimpleNamespace(req=number, kv_receiver=SimpleNamespace(handle=handle))
        for number, handle in enumerate(handles)
    ]
    many.append(SimpleNamespace(req="SGLang's", kv_receiver=SimpleNamespace()))

    def extends(of: Any, requests: Any) -> None:
        assert (of, requests) == (queue, many)
        order.extend(vars(handle).get("request") for handle in handles[::2])

    assert pool_hooks.around_extend(extends, queue, many) is None
    assert (order, [handle.request for handle in handles[::2]]) == ([None, None], [0, 2])


# ---------------------------------------------------------------- a forward's event


def test_a_forwards_event_is_recorded_on_the_forward_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_mixkv.engine import gpu

    class Stream: ...

    made = list[Any]()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: made.append(MagicMock()) or made[-1])
    for without in (None, SimpleNamespace(), SimpleNamespace(forward_stream=object())):
        assert gpu.forward_event(without) is None
    stream = Stream()
    assert gpu.forward_event(SimpleNamespace(forward_stream=stream)) is made[0]
    assert made[0].mock_calls == [call.record(stream)]
