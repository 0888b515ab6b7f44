"""The threads of the channel beside a clock that is no help: what has ended is noticed at once, and
what fails again and again, or never ends, stops nothing else. And the CUDA events that it asks.

Where the tick is 60 s, a wake-up that is lost shows as a request that is not decided.
"""

from __future__ import annotations

import contextlib
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
from sglang_mixkv.draft import copier
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.prefill.transfer import MAX_IN_FLIGHT

LOST_S = 8.0  # far from a tick, and from what takes milliseconds
AT_ONCE_S = 0.03  # the best of some tries, on a machine that is busy
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


def test_looks_are_as_often_and_as_long_as_was_measured() -> None:
    """The machines need the first ten times a second."""
    assert (loop.TICK, loop.ASKED, copier.AT_ONCE) == (0.1, 30e-6, 256 << 10)
    assert (sockets.BATCH, links.CONNECT_S, MAX_IN_FLIGHT) == (64, 5.0, 16)
    assert (data_plane.CONNECT_S, data_plane.POLL_S, data_plane.RETRY_S) == (10.0, 1e-3, 1e-2)


def decided(channel: Channel, handle: Any) -> tuple[str, str]:
    assert wait_for(lambda: handle.state is not None, LOST_S), "a wake-up was lost"
    return channel.state(handle)


def best(channel: Channel, begin: Callable[[int], tuple[Any, Any]]) -> float:
    """Seconds from what `begin` does at last until the verdict, which takes no longer each time:
    the best of some requests that are warm."""
    found = []
    for room in range(TRIES):
        sent, handle = begin(room)
        began = time.perf_counter()
        assert decided(channel, handle) == ("warm", "")
        found.append(time.perf_counter() - began)
        channel.end(sent, handle)
    return min(found)


# ---------------------------------------------------------------- the ends of reads and copies


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
    """A thread makes the copy while the channel's thread sleeps, or a device does, whose end wakes
    nobody, so that the channel's thread polls."""
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


def test_a_copy_has_ended_when_its_thread_wakes_the_other() -> None:
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


# ---------------------------------------------------------------- what comes meanwhile


@pytest.mark.parametrize("is_decided", [False, True])
@pytest.mark.parametrize("reason", ["", "aborted"])
def test_the_scheduler_wakes_the_channel_for_what_cannot_wait(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, is_decided: bool, reason: str
) -> None:
    """A wake-up costs the scheduler 10 us. Inputs that only start a clock, and the end of a request
    with nothing in flight, wait for the next event or tick. (Undecided halves belong to two
    requests here, since the end of one half decides the other.)"""
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


def test_an_event_put_while_others_are_taken_leaves_a_wake_up() -> None:
    queue: EventQueue[int] = EventQueue()
    inner = queue._events

    class Queue:
        """A queue into which another thread puts an event after the last look of `take`."""

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
    assert ready, "nobody looks for it before the next tick"
    assert queue.take(ready) == [2]


def test_an_event_is_there_before_its_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: EventQueue[int] = EventQueue()
    taken = list[list[int]]()
    monkeypatch.setattr(queue, "wake", lambda: taken.append(queue.take([])))
    queue.put(1)
    assert taken == [[1]]


@pytest.mark.parametrize(
    ("side", "leaves"), [("prefill", True), ("prefill", False), ("decode", True)]
)
def test_a_message_that_comes_beside_a_send_is_seen_at_once(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, side: str, leaves: bool
) -> None:
    """A send takes note of what came, and its file is not readable any more, also where it fails.
    On prefill an OPEN comes before a READY leaves, on decode a READY before an ACK. (What does not
    leave on decode: test_links.py.)"""
    monkeypatch.setattr(copier, "AT_ONCE", 0)  # it is sent in a look that no message began
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
            time.sleep(0.01)  # libzmq does not look at what came within the last millisecond
            if not leaves:
                action = decode_actions.Send(b"nobody", action.message)
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


# ---------------------------------------------------------------- the clock goes on


def raising(*_: Any) -> Any:
    raise MemoryError("again")


def look(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises each time."""
    monkeypatch.setattr(worker, "_poll", raising)


def report(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reporter raise with each tick."""
    monkeypatch.setattr(worker._reporter, "ticked", raising)


def handle(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that nobody can handle come with each look."""
    real = worker._poll

    def unknown(ready: list[Any]) -> Iterator[Any]:
        yield object()
        yield from real(ready)
        yield object()

    monkeypatch.setattr(worker, "_poll", unknown)


@pytest.mark.parametrize("fails", [look, report, handle])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_clock_goes_on_beside_what_fails_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, side: str,
    fails: Callable[[Any, Any], None],
) -> None:  # fmt: skip
    """A room is given up by its time, and not by SGLang's scheduler. And the log is not filled,
    however often the thread looks."""
    began = time.monotonic()
    with Channel() as channel, monkeypatch.context() as patch:
        worker = getattr(channel, side).channel
        patch.setattr(worker, "_must_poll", lambda: True)
        if side == "prefill":
            sent = channel.prefill.send(1, TOKENS)  # nobody opens it
            fails(worker, patch)
            channel.prefill.channel.release(sent)
            assert wait_for(lambda: sent.pages_released, LOST_S), "no time passes"
        else:
            room = channel.open(1, TOKENS)  # nobody sends it
            fails(worker, patch)
            channel.decode.channel.target_arrived(room)
            assert decided(channel, room) == ("cold", "deadline")
        assert not worker.broken
        logged = len([line for line in caplog.messages if "failed on" in line])
        assert 0 < logged <= 1 + (time.monotonic() - began) / loop.TICK


# ---------------------------------------------------------------- CUDA events


CAPTURING = "CUDA error: operation not permitted when stream is capturing"


class Answers(Event):
    """A torch.cuda.Event that raises this for as long as the test says so."""

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
        """Wait until the channel's thread has polled this event that many times more."""
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
    """The room's rows are zeroed once the forward is known to have ended, and no peer gets a
    strike."""
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
def test_a_request_ends_whose_forward_never_has_an_answer(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """SGLang's scheduler asks for as long again as the channel had, and then fails it: its rows may
    be another request's. One whose forward runs is waited for."""
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
    assert untouched(channel, rooms[0]), "rows were written behind the end"
    for room in rooms:
        decode.close(room)


def test_a_chunk_is_not_written_while_a_graph_is_captured(channel: Channel) -> None:
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
    """The request goes on without draft KV, also for a reader that opens it later."""
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
        side.channel._queue.wake()  # the end of a request waits for the next event
    assert channel.at_rest()


def test_pages_of_which_nobody_knows_are_read_in_neither_way() -> None:
    pages, device = Pages(np.arange(2), 4), mock.Mock()
    pages.on(device)
    pages.error = RuntimeError("nobody knows")
    for read in (partial(pages.rows, 0, 1), partial(pages.on, device)):
        with pytest.raises(RuntimeError, match="nobody knows"):
            read()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_ends_before_its_event_holds_nothing_back(
    channel: Channel, side: str
) -> None:
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


def test_torchs_errors_during_a_capture_are_recognized() -> None:
    """PyTorch's errors carry the text of CUDA's runtime: the codes 900 to 908, and no others, mean
    a capture."""
    from ctypes import CDLL, c_char_p

    from sglang_mixkv.draft.cuda import is_over

    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart.so" in line}
    if not paths:
        pytest.skip(f"PyTorch {torch.__version__} brings no CUDA")
    text = CDLL(paths.pop()).cudaGetErrorString
    text.restype = c_char_p
    known = []
    for code in range(1100):
        error = RuntimeError(f"CUDA error: {text(code).decode()}")
        with contextlib.suppress(RuntimeError):
            known.append((code, is_over(mock.Mock(**{"query.side_effect": error}))))
    assert known == [(code, False) for code in range(900, 909)]


def test_what_a_tick_decides_is_done_before_the_thread_sleeps(monkeypatch: Any) -> None:
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
    """Nothing is outstanding after the end of a request."""
    with Channel() as one:
        assert one.request(1) == ("warm", "")
        poller = getattr(one, side).channel._poller
        with mock.patch.object(poller, "wait", wraps=poller.wait) as wait:
            assert wait_for(lambda: wait.call_count > 3)
        assert not any(call.args[1] for call in wait.call_args_list[1:])


def test_what_was_moved_is_counted_and_what_was_zeroed_is_not() -> None:
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


def test_a_cold_request_gives_its_slots_back_before_its_forward_ends(channel: Channel) -> None:
    """Its segments would only be zeroed again, and others wait for slots."""
    forward, slots = Event(), channel.decode.slots
    sent, room = channel.prefill.send(1, TOKENS), channel.open(1, TOKENS, event=forward)
    assert wait_for(lambda: bool(channel.decode.channel._held), LOST_S)
    assert slots.free_slots < slots.count
    channel.decode.channel.drop(channel.prefill.instance)
    assert wait_for(lambda: slots.free_slots == slots.count, LOST_S)
    assert room.state is None
    assert untouched(channel, room)
    forward.done = True
    assert decided(channel, room) == ("cold", "lost")
    assert not channel.decode.rows_of(room).any()
    channel.end(sent, room)
