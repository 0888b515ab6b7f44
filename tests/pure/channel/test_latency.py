"""The channel threads notice the end of a read or copy at once, and survive steps that fail.

Most tests use a tick of 60 s, so that a lost wake-up shows as a request that is not decided. The
last part tests how the threads poll CUDA events.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rig.channel.invariants import outstanding
from rig.channel.threads import CANARY, SEGMENT, Channel, Event, wait_for

from sglang_mixkv.channel import data_plane, loop, sockets
from sglang_mixkv.channel.sockets import EventQueue
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as decode_actions
from sglang_mixkv.decode import links
from sglang_mixkv.decode.worker import DecodeWorker
from sglang_mixkv.draft import copier
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.prefill.transfer import MAX_IN_FLIGHT

LOST_S = 8.0  # much shorter than a tick, much longer than any step
AT_ONCE_S = 0.03  # limit for the best of several tries on a busy machine
TRIES = 10
TOKENS = 3 * SEGMENT


@pytest.fixture
def slow_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TICK", 60.0)


@pytest.fixture
def channel(slow_tick: None) -> Iterator[Channel]:
    with Channel(Times(20)) as one:
        yield one
        assert max(side.notes.ticks for side in (one.prefill, one.decode)) <= 1


def test_intervals_are_those_that_were_measured() -> None:
    """Intervals and batch sizes have the values that were chosen by measurement.

    The state machines need ten ticks a second.
    """
    assert (loop.TICK, loop.ASKED, copier.AT_ONCE) == (0.1, 30e-6, 256 << 10)
    assert (sockets.BATCH, links.CONNECT_S, MAX_IN_FLIGHT) == (64, 5.0, 16)
    assert (data_plane.CONNECT_S, data_plane.POLL_S, data_plane.RETRY_S) == (10.0, 1e-3, 1e-2)


def decided(channel: Channel, handle: Any) -> tuple[str, str]:
    assert wait_for(lambda: handle.state is not None, LOST_S), "a wake-up was lost"
    return channel.state(handle)


def best(channel: Channel, begin: Callable[[int], tuple[Any, Any]]) -> float:
    """Return the shortest time, of several warm requests, from `begin` to the verdict."""
    found = []
    for room in range(TRIES):
        sent, handle = begin(room)
        began = time.perf_counter()
        assert decided(channel, handle) == ("warm", "")
        found.append(time.perf_counter() - began)
        channel.end(sent, handle)
    return min(found)


# ---------------------------------------------------------------- ends of reads and copies


def test_the_end_of_a_read_is_noticed_at_once(channel: Channel) -> None:
    def begin(room: int) -> tuple[Any, Any]:
        channel.decode.plane.held = True
        both = channel.prefill.send(room, TOKENS), channel.open(room, TOKENS)
        assert wait_for(lambda: channel.decode.plane.busy, LOST_S)
        time.sleep(0.01)  # longer than the thread polls eagerly
        channel.decode.plane.held = False
        return both

    assert best(channel, begin) < AT_ONCE_S


@pytest.mark.parametrize("wakes", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_end_of_a_large_copy_is_noticed_at_once(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, side: str, wakes: bool
) -> None:
    """The channel thread notices the end of a large copy at once.

    Either a copying thread wakes the channel thread, or the copy runs on a device without a wake-up
    and the channel thread polls.
    """
    monkeypatch.setattr(copier, "AT_ONCE", 0)
    if not wakes:
        copies = getattr(channel, side).channel._copies
        monkeypatch.setattr(copies, "_wake", lambda: None)
        monkeypatch.setattr(copies, "polled", True)
    copy, go = {"prefill": "pack", "decode": "unpack"}[side], threading.Semaphore(0)
    rows = getattr(channel, side).rows
    real, under_way = getattr(rows, copy), threading.Event()

    def slow(*what: Any) -> Any:
        under_way.set()
        assert go.acquire(timeout=LOST_S)
        return real(*what)

    monkeypatch.setattr(rows, copy, slow)

    def begin(room: int) -> tuple[Any, Any]:
        under_way.clear()
        both = channel.prefill.send(room, SEGMENT), channel.open(room, SEGMENT)
        assert under_way.wait(LOST_S)
        time.sleep(0.01)
        go.release()
        return both

    assert best(channel, begin) < AT_ONCE_S


def test_a_copy_is_reported_before_the_wake_up() -> None:
    seen, woken = list[list[Any]](), threading.Event()

    def wake() -> None:
        seen.append([copy.job for copy, _, _ in host.done])
        woken.set()

    store: Any = mock.Mock(**{"rows.bytes_per_head": copier.AT_ONCE + 1})
    host = copier.HostCopier(store, mock.Mock(), "copies", wake)
    host.start([copier.Copy("clear", "a", Gate(), mock.Mock(), 0, 1, range(1))])
    assert woken.wait(LOST_S)
    assert seen == [["a"]]
    host._work.put(None)
    host._thread.join()


# ---------------------------------------------------------------- wake-ups


@pytest.mark.parametrize("is_decided", [False, True])
@pytest.mark.parametrize("reason", ["", "aborted"])
def test_the_scheduler_wakes_the_channel_only_when_needed(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, is_decided: bool, reason: str
) -> None:
    """SGLang's scheduler wakes the channel thread only for calls that cannot wait.

    A wake-up costs the scheduler 10 us. Calls that only start a clock wait for the next event or
    tick, and so does the end of a request with nothing in flight. The undecided sender and receiver
    belong to two requests here, since the end of one would decide the other.
    """
    prefill, decode = channel.prefill.channel, channel.decode.channel
    woken, made = list[threading.Thread](), list[Any]()

    def wakes(call: Callable[..., Any], *given: Any) -> bool:
        woken.clear()
        made.append(call(*given))
        return threading.main_thread() in woken

    for queue in (prefill._queue, decode._queue):
        real = queue.wake

        def wake(real: Callable[[], None] = real) -> None:
            woken.append(threading.current_thread())
            real()

        monkeypatch.setattr(queue, "wake", wake)
    assert not wakes(prefill.begin, 1)
    assert wakes(channel.open, 1 if is_decided else 2, TOKENS)
    sent, room = made
    if is_decided:
        pages = channel.prefill.pages(TOKENS)
        assert wakes(prefill.add_chunk, sent, 0, TOKENS, True, pages)
        assert decided(channel, room) == ("warm", "")
        assert wait_for(lambda: sent.pages_released, LOST_S)
    assert not wakes(prefill.release, sent)
    assert not wakes(decode.target_arrived, room)
    for call, one in ((prefill.end, sent), (decode.close, room)):
        assert wakes(call, one, reason) == (bool(reason) or not is_decided)
        assert not wakes(call, one, "once more")


def test_an_event_queued_during_take_leaves_a_wake_up() -> None:
    queue: EventQueue[int] = EventQueue()
    inner = queue._events

    class Queue:
        """A queue that gets another event right after `take` has found it empty."""

        def empty(self) -> bool:
            if found := inner.empty():
                queue._events = inner
                queue.put(2)
            return found

        get_nowait = inner.get_nowait

    queue.put(1)
    queue._events = Queue()  # type: ignore[assignment]
    assert queue.take([queue.fileno()]) == [1]
    ready, _, _ = select.select([queue.fileno()], [], [], 0)
    assert ready, "the second event would wait for the next tick"
    assert queue.take(ready) == [2]


def test_an_event_is_queued_before_its_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: EventQueue[int] = EventQueue()
    taken = list[list[int]]()
    monkeypatch.setattr(queue, "wake", lambda: taken.append(queue.take([])))
    queue.put(1)
    assert taken == [[1]]


@pytest.mark.parametrize(
    ("side", "leaves"), [("prefill", True), ("prefill", False), ("decode", True)]
)
def test_a_message_that_arrives_during_a_send_is_read(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, side: str, leaves: bool
) -> None:
    """A message that arrives during a send is read at once.

    libzmq processes the arrival inside the send, even a failed one, and the socket's file is not
    readable after that. On prefill an OPEN arrives while a READY is sent, on decode a READY while
    an ACK is sent. test_links.py has the failed send on decode.
    """
    monkeypatch.setattr(copier, "AT_ONCE", 0)  # so that the send follows a copy, not a message
    worker: Any = getattr(channel, side).channel
    peer = channel.prefill.instance
    send = worker._do
    if side == "prefill":
        fd, kind, message = worker._socket.fileno(), decode_actions.Send, "Ready"
    else:
        fd, kind, message = worker._links._links[peer].dealer.fileno(), decode_actions.Send, "Ack"
    once, others = [True], list[Any]()
    sent = [channel.prefill.send(1, SEGMENT)]

    def do(action: Any) -> None:
        if once and isinstance(action, kind) and type(action.message).__name__ == message:
            once.clear()
            if side == "prefill":
                others.append(channel.open(2, SEGMENT))
            else:
                sent.append(channel.prefill.send(2, SEGMENT))
            assert select.select([fd], [], [], LOST_S)[0]
            time.sleep(0.01)  # libzmq checks for arrivals at most once per millisecond
            if not leaves:
                action = decode_actions.Send(b"unknown", action.message)
        send(action)

    monkeypatch.setattr(worker, "_do", do)
    if side == "prefill":
        sent.append(channel.prefill.send(2, SEGMENT))
    else:
        others.append(channel.open(2, SEGMENT))
    first = channel.open(1, SEGMENT)
    assert wait_for(lambda: len(others) == 1 and len(sent) == 2, LOST_S)
    assert decided(channel, others[0]) == ("warm", "")
    assert not leaves or decided(channel, first) == ("warm", "")
    for one, handle in zip(sent, [first, others[0]], strict=True):
        channel.end(one, handle)


# ---------------------------------------------------------------- repeated failures


def raising(*_: Any) -> Any:
    raise MemoryError("again")


def look(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each poll raise."""
    monkeypatch.setattr(worker, "_poll", raising)


def report(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each call of the reporter's `ticked` raise."""
    monkeypatch.setattr(worker._reporter, "ticked", raising)


def handle(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each poll return events that cannot be handled."""
    real = worker._poll

    def unknown(ready: list[Any]) -> Iterator[Any]:
        yield object()
        yield from real(ready)
        yield object()

    monkeypatch.setattr(worker, "_poll", unknown)


@pytest.mark.parametrize("fails", [look, report, handle])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_rooms_time_out_although_a_step_always_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, side: str,
    fails: Callable[[Any, Any], None],
) -> None:  # fmt: skip
    """A room times out in the channel thread although a step of the thread fails every time.

    The failure is logged at most once per tick, however often the thread polls.
    """
    began = time.monotonic()
    with Channel() as channel, monkeypatch.context() as patch:
        worker = getattr(channel, side).channel
        patch.setattr(worker, "_must_poll", lambda: True)
        if side == "prefill":
            sent = channel.prefill.send(1, TOKENS)  # decode does not open this request
            fails(worker, patch)
            channel.prefill.channel.release(sent)
            assert wait_for(lambda: sent.pages_released, LOST_S), "the clock has stopped"
        else:
            room = channel.open(1, TOKENS)  # prefill does not send this request
            fails(worker, patch)
            channel.decode.channel.target_arrived(room)
            assert decided(channel, room) == ("cold", "deadline")
        assert not worker.broken
        logged = len([line for line in caplog.messages if "failed on" in line])
        assert 0 < logged <= 1 + (time.monotonic() - began) / loop.TICK


# ---------------------------------------------------------------- CUDA events


CAPTURING = "CUDA error: operation not permitted when stream is capturing"


class Answers(Event):
    """A torch.cuda.Event whose `query` raises `error` while it is set."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.error: RuntimeError | None = RuntimeError(text)
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.done

    def is_asked(self, times: int = 3) -> bool:
        """Wait until the channel thread has polled this event `times` more times."""
        until = self.asked + times
        return wait_for(lambda: self.asked >= until, LOST_S)


def untouched(channel: Channel, room: Any) -> bool:
    return bool((channel.decode.rows_of(room) == CANARY).all())


def test_a_forward_counts_as_running_while_a_graph_is_captured(channel: Channel) -> None:
    forward = Answers(CAPTURING)
    sent, room = channel.prefill.send(1, TOKENS), channel.open(1, TOKENS, event=forward)
    assert forward.is_asked()
    forward.error = None
    assert forward.is_asked()
    assert room.state is None
    assert untouched(channel, room)
    forward.done = True
    assert decided(channel, room) == ("warm", "")
    assert channel.same(room)
    channel.end(sent, room)


def test_a_forward_that_cannot_be_queried_makes_its_room_cold(channel: Channel) -> None:
    """A room goes cold if the event of its earlier forward raises.

    Its rows are zeroed once the event reports the end of the forward.
    """
    forward = Answers("CUDA error: unknown error")
    sent, room = channel.prefill.send(1, TOKENS), channel.open(1, TOKENS, event=forward)
    assert wait_for(lambda: "unpack" in channel.decode.notes.seen, LOST_S)
    forward.error = None
    assert forward.is_asked()
    assert room.state is None
    assert untouched(channel, room)
    forward.done = True
    assert decided(channel, room) == ("cold", "unpack")
    assert not channel.decode.rows_of(room).any()
    assert channel.decode.notes.seen.count("unpack") == 1
    channel.end(sent, room)
    assert channel.request(2) == ("warm", "")


@pytest.mark.parametrize("text", [CAPTURING, "CUDA error: unknown error"])
def test_a_request_whose_event_always_raises_fails(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """SGLang's scheduler fails a request if the event of its earlier forward keeps raising.

    The request fails after twice the time that the channel thread had, since the rows may hold
    another request's KV. The scheduler keeps waiting for a forward that still runs.
    """
    decode, forward, running = channel.decode.channel, Answers(text), Event()
    rooms = [channel.open(n, TOKENS, event=event) for n, event in enumerate((forward, running))]
    monkeypatch.setattr(decode, "_slowest", 0.2)
    for room in rooms:
        decode.target_arrived(room)
    assert wait_for(lambda: all(map(decode.is_lost, rooms)), LOST_S)
    for room in rooms:
        decode.clear_now(room)
        assert room.state is None

    def failed() -> bool:
        for room in rooms:
            decode.clear_now(room)
        return rooms[0].state is not None

    assert wait_for(failed, LOST_S)
    waited = time.monotonic() - rooms[0].arrived
    assert waited > 2 * decode._slowest
    state, reason = channel.state(rooms[0])
    assert (state, text in reason) == ("failed", True)
    assert rooms[1].state is None
    forward.error, forward.done = None, True
    assert wait_for(lambda: not decode._held, LOST_S)
    assert wait_for(lambda: not outstanding(decode._machine).get("jobs"), LOST_S)
    assert untouched(channel, rooms[0]), "rows were written after the request's end"
    for room in rooms:
        decode.close(room)


def test_a_chunk_counts_as_unwritten_during_a_capture(channel: Channel) -> None:
    rows = channel.prefill.pages(TOKENS).rows(0, TOKENS)
    real = channel.prefill.memory[:, rows].copy()
    channel.prefill.memory[:, rows] = 0x33
    chunk = Answers(CAPTURING)
    sent, room = channel.prefill.send(1, TOKENS, events=(chunk,)), channel.open(1, TOKENS)
    assert chunk.is_asked()
    chunk.error = None
    assert chunk.is_asked()
    channel.prefill.memory[:, rows] = real
    chunk.done = True
    assert decided(channel, room) == ("warm", "")
    assert channel.same(room)
    channel.end(sent, room)


def test_a_chunk_whose_event_cannot_be_queried_is_not_packed(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk whose event raises is not packed, and its request goes cold for all readers.

    In this test the reader opens the request later.
    """
    packs = list[Any]()
    monkeypatch.setattr(channel.prefill.rows, "pack", lambda *what: packs.append(what))
    done, chunk = Event(), Answers("CUDA error: unknown error")
    done.done = True
    sent = channel.prefill.send(1, TOKENS, events=(done, chunk))
    assert wait_for(lambda: not channel.prefill.channel._held, LOST_S)
    room = channel.open(1, TOKENS)
    assert decided(channel, room) == ("cold", "prefill_pack")
    assert wait_for(lambda: channel.prefill.channel.release(sent), LOST_S)
    channel.end(sent, room)
    assert not packs
    monkeypatch.undo()
    monkeypatch.setattr(loop, "TICK", 60.0)
    assert channel.request(2) == ("warm", "")
    for side in (channel.prefill, channel.decode):
        side.channel._queue.wake()  # otherwise the ends of requests would wait for the tick
    assert channel.at_rest()


def test_pages_with_an_error_cannot_be_read() -> None:
    pages, device = Pages(np.arange(2), 4), mock.Mock()
    pages.on(device)
    pages.error = RuntimeError("unknown state")
    for read in (partial(pages.rows, 0, 1), partial(pages.on, device)):
        with pytest.raises(RuntimeError, match="unknown state"):
            read()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_ends_before_its_event_is_released(channel: Channel, side: str) -> None:
    event, worker = Answers(CAPTURING), getattr(channel, side).channel
    sent = channel.prefill.send(1, TOKENS, events=(event,) if side == "prefill" else ())
    room = channel.open(1, TOKENS, event=event if side == "decode" else None)
    assert event.is_asked()
    ends = [
        partial(channel.prefill.channel.end, sent, "aborted"),
        partial(channel.decode.channel.close, room, "aborted"),
    ]
    for end in ends if side == "prefill" else reversed(ends):
        end()
    assert wait_for(lambda: not worker._must_poll(), LOST_S)
    assert channel.at_rest()
    asked = event.asked
    assert channel.request(2) == ("warm", "")
    assert event.asked == asked


def test_errors_of_a_graph_capture_are_recognized() -> None:
    """Exactly the CUDA errors 900 to 908 count as a graph capture in progress.

    PyTorch's exceptions contain the texts of CUDA's runtime.
    """
    from ctypes import CDLL, c_char_p

    from sglang_mixkv.draft.cuda import is_over

    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart.so" in line}
    if not paths:
        pytest.skip(f"PyTorch {torch.__version__} has no CUDA runtime")
    text = CDLL(paths.pop()).cudaGetErrorString
    text.restype = c_char_p
    known = []
    for code in range(1100):
        error = RuntimeError(f"CUDA error: {text(code).decode()}")
        with contextlib.suppress(RuntimeError):
            known.append((code, is_over(mock.Mock(**{"query.side_effect": error}))))
    assert known == [(code, False) for code in range(900, 909)]


def test_actions_of_a_tick_run_before_the_thread_sleeps(monkeypatch: Any) -> None:
    with Channel() as one:
        worker: Any = one.decode.channel
        order, wait, tick, do = list[str](), worker._poller.wait, worker._machine.tick, worker._do

        def ticks() -> None:
            tick()
            order.append("tick")
            worker._machine._out.append(decode_actions.Note("doubled", b"", ""))

        def done(action: Any) -> None:
            do(action)
            order.append(type(action).__name__)

        def slept(*args: Any) -> Any:
            order.append("sleep")
            return wait(*args)

        monkeypatch.setattr(worker._machine, "tick", ticks)
        monkeypatch.setattr(worker, "_do", done)
        monkeypatch.setattr(worker._poller, "wait", slept)
        assert wait_for(lambda: order.count("tick") > 2)
    at = order.index("tick", 1)
    assert order[at + 1] == "Note"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_idle_rank_sleeps_and_does_not_poll(side: str) -> None:
    """A rank with nothing outstanding sleeps between ticks and does not poll."""
    with Channel() as one:
        assert one.request(1) == ("warm", "")
        poller = getattr(one, side).channel._poller
        with mock.patch.object(poller, "wait", wraps=poller.wait) as wait:
            assert wait_for(lambda: wait.call_count > 3)
        assert not any(call.args[1] for call in wait.call_args_list[1:])


def test_a_long_read_is_polled_often_only_when_it_has_begun(channel: Channel) -> None:
    """The start of a read counts as something that happened, and its running does not."""
    worker, plane = channel.decode.channel, channel.decode.plane
    plane.held = True
    sent, room = channel.prefill.send(1, SEGMENT), channel.open(1, SEGMENT)
    assert wait_for(lambda: plane.busy)
    (read,) = worker._machine._segments._reads
    assert wait_for(lambda: worker._poller.came >= read.began)
    came = worker._poller.came
    time.sleep(3 * sockets.EAGER)
    assert worker._poller.came == came
    plane.held = False
    assert decided(channel, room) == ("warm", "")
    channel.end(sent, room)


def test_a_batch_on_a_device_is_awaited_for_as_long_as_a_sleep_takes() -> None:
    """The thread queries a batch for ASKED seconds after its launch, and then sleeps."""
    worker: Any = object.__new__(DecodeWorker)
    copies, clock = mock.Mock(polled=True, launched=7.0), itertools.count()
    done = mock.PropertyMock(return_value=False)
    type(copies).done = done
    worker._machine = mock.Mock(**{"actions.return_value": []})
    worker._copies, worker._clock = copies, lambda: 7.0 + next(clock) * loop.ASKED / 10
    worker._act()
    assert 10 <= done.call_count <= 12


def test_moved_bytes_are_counted_but_not_zeroed_ones() -> None:
    began = time.monotonic()
    with Channel() as one:
        assert one.request(1) == ("warm", "")
        moved = [side.notes.bytes for side in (one.prefill, one.decode)]
        assert moved[0] == moved[1] > 0
        one.decode.plane.broken = 1
        assert one.request(2)[0] == "cold"
        assert one.decode.notes.bytes <= 2 * moved[1] - 1
        for side in (one.prefill, one.decode):
            assert 0 < side.notes.copying < time.monotonic() - began


def test_a_cold_request_frees_its_slots_during_a_forward(channel: Channel) -> None:
    """A cold request frees its slots at once, although an earlier forward still runs.

    The segments in these slots are useless, and other requests wait for slots.
    """
    forward, slots = Event(), channel.decode.slots
    sent, room = channel.prefill.send(1, TOKENS), channel.open(1, TOKENS, event=forward)
    assert wait_for(lambda: bool(channel.decode.channel._held), LOST_S)
    assert len(slots.free_slots) < slots.count
    channel.decode.channel.drop(channel.prefill.instance)
    assert wait_for(lambda: len(slots.free_slots) == slots.count, LOST_S)
    assert room.state is None
    assert untouched(channel, room)
    forward.done = True
    assert decided(channel, room) == ("cold", "lost")
    assert not channel.decode.rows_of(room).any()
    channel.end(sent, room)
