"""The two state machines driven by hand: rules that a reader should find without the simulator."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from rig.books import wrong_books

from sglang_mixkv.channel.messages import MAX_LIST, Ack, Announced, Fail, Open, Ready, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as dev
from sglang_mixkv.decode.breaker import STRIKES
from sglang_mixkv.decode.machine import Machine as DecodeMachine
from sglang_mixkv.prefill import events as pev
from sglang_mixkv.prefill import machine as prefill_module
from sglang_mixkv.prefill import waiting
from sglang_mixkv.prefill.machine import Machine as PrefillMachine

PREFILL, READER, OTHER = b"prefill_", b"reader_0", b"reader_1"
ROOM, TIMES = 7, Times()


class Driven:
    """A machine that is asked for actions after each event. Copies are listed one by one."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.left = machine.left

    def handle(self, event: Any, now: float) -> list[Any]:
        self.machine.handle(event, now)
        found = []
        for action in self.machine.actions():
            found += action.jobs if isinstance(action, pev.Pack | dev.Copy) else (action,)
        return found


def prefill(slots: int = 8) -> Driven:
    pool = SlotPool(slots, TIMES)
    return Driven(PrefillMachine(PREFILL, range(4), lambda heads, size: 10, pool, TIMES))


def opened(
    generation: int, reader: bytes = READER, readers: int = 1, room: int = ROOM
) -> pev.Received:
    message = Open(3, room, generation, PREFILL, reader, readers, (0, 4), 0, 1 << 20)
    return pev.Received(b"connection" + reader, message)


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def uses_of(actions: list[Any]) -> list[Any]:
    """Of the requests that are settled."""
    return [action.use for action in of(pev.Settled, actions)]


def test_a_lost_open_is_not_mistaken_for_the_next_requests() -> None:
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(opened(11, OTHER, readers=2), 0.0)
    rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0)
    gone = fail(ROOM, 10, "closed", reader=READER)  # its OPEN never came
    rooms.handle(pev.Received(b"new", gone), 0.3)
    actions = rooms.handle(opened(20), 0.5)
    assert of(pev.PackJob, actions) == []
    rooms.handle(pev.End(0), 0.6)
    rooms.handle(pev.Begin(1, ROOM), 0.7)
    (pack,) = of(pev.PackJob, rooms.handle(pev.AddChunk(1, 0, 8, last=True), 0.8))
    assert pack.handle == 1


def test_a_fail_behind_a_request_that_prefill_has_ended_leaves_nothing() -> None:
    """Decode gave it up while its last READY travelled."""
    rooms = prefill()
    rooms.handle(pev.Begin(1, ROOM), 0.0)
    rooms.handle(opened(10), 0.0)
    (pack,) = of(pev.PackJob, rooms.handle(pev.AddChunk(1, 0, 8, last=True), 0.0))
    (send,) = of(pev.Send, rooms.handle(pev.Packed((pack.job,)), 0.1))
    assert send.message.last
    rooms.handle(pev.End(1), 0.2)
    rooms.handle(pev.Received(b"c", fail(ROOM, 10, "lost", reader=READER)), 0.3)
    assert "waiting" not in rooms.left()


def test_what_is_late_of_an_earlier_request_does_not_touch_the_next() -> None:
    """The FAIL of one that has ended here as well, whose reader had no answer yet; its OPEN."""
    rooms = prefill()
    gone = pev.Received(b"connection" + READER, fail(ROOM, 10, "closed", reader=READER))
    rooms.handle(pev.Begin(1, ROOM), 0.0)
    rooms.handle(opened(10), 0.0)
    rooms.handle(pev.End(1), 0.1)
    rooms.handle(gone, 0.2)
    rooms.handle(opened(20), 0.3)
    rooms.handle(opened(10), 0.4)
    rooms.handle(pev.Begin(2, ROOM), 0.5)
    (pack,) = of(pev.PackJob, rooms.handle(pev.AddChunk(2, 0, 8, last=True), 0.5))
    (send,) = of(pev.Send, rooms.handle(pev.Packed((pack.job,)), 0.6))
    assert (pack.handle, send.message.generation) == (2, 20)


def test_a_request_that_came_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its OPEN came first, as it does mostly; and one that comes later needs no place."""
    monkeypatch.setattr(waiting, "MAX_WAITING", 1)
    rooms = prefill()
    for room in range(3):
        assert of(pev.Send, rooms.handle(opened(10 + room, room=room), 0.0)) == []
        rooms.handle(pev.Begin(room, room), 0.0)
    assert of(pev.Send, rooms.handle(opened(20, room=9), 0.0)) == []
    rooms.handle(pev.Begin(3, 3), 0.0)
    late = replace(opened(22, room=3).message, reader=READER)
    connection = b"connection" + READER
    assert of(pev.Send, rooms.handle(pev.Received(connection, late), 0.0)) == []
    refused = of(pev.Send, rooms.handle(opened(23, room=4), 0.0))
    assert [one.message.code for one in refused] == ["full"]


def test_of_readers_that_wait_the_newest_is_the_requests() -> None:
    """The other one's request has never come: its decode server has died."""
    rooms = prefill()
    rooms.handle(opened(10, OTHER), 0.0)
    rooms.handle(opened(11), 1.0)
    rooms.handle(pev.Begin(0, ROOM), 1.0)
    (pack,) = of(pev.PackJob, rooms.handle(pev.AddChunk(0, 0, 8, last=True), 1.0))
    (send,) = of(pev.Send, rooms.handle(pev.Packed((pack.job,)), 1.0))
    assert send.message.generation == 11


def test_a_generation_names_one_part() -> None:
    """Readers draw theirs apart; the second of two that are equal is not served."""
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(opened(10, READER, readers=2), 0.0)
    rooms.handle(opened(10, OTHER, readers=2), 0.0)
    assert set(rooms.machine._uses[0].parts) == {READER}
    rooms.handle(pev.End(0), 0.1)
    assert (rooms.left(), wrong_books(rooms.machine)) == ({}, [])


def test_a_lost_open_may_have_told_of_more_readers() -> None:
    """They have the time of SGLang's transfer."""
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    gone = pev.Received(b"new", fail(ROOM, 10, "closed", reader=READER))
    assert uses_of(rooms.handle(gone, 0.0)) == []
    rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0)
    (pack,) = of(pev.PackJob, rooms.handle(opened(11, OTHER, readers=2), 0.1))
    assert uses_of(rooms.handle(pev.Packed((pack.job,)), 0.2)) == [0]


def test_a_slot_rests_while_its_rank_does() -> None:
    """A stopped process sends its READY when it goes on: time that it stood still is no time."""
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0)
    (pack,) = of(pev.PackJob, rooms.handle(opened(10), 0.0))
    rooms.handle(pev.Packed((pack.job,)), 0.0)
    rooms.handle(pev.Tick(), 1000.0)
    assert rooms.left()["offered"] == 1
    for second in range(1001, 1061):
        rooms.handle(pev.Tick(), second)
    assert "offered" not in rooms.left()


def decode() -> Driven:
    return Driven(DecodeMachine(READER, SlotPool(8, TIMES), 1 << 20, TIMES))


def room(generation: int = 10, **more: Any) -> dev.OpenRoom:
    source = dev.Source(PREFILL, range(4), 1, slots=8, segment_tokens=10)
    return dev.OpenRoom(generation, ROOM, (source,), 0, 16, **more)


def ready(segment: int = 0, generation: int = 10, count: int = 8) -> dev.Received:
    announced = Announced(segment, 99, count)
    message = Ready(ROOM, generation, segment, 8 * segment, (announced,), segment == 1)
    return dev.Received(PREFILL, message)


def test_a_thread_that_stood_still_drops_what_it_was_sent_before() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    actions = rooms.handle(ready(), TIMES.stall + 0.1)
    assert of(dev.StartRead, actions) == []
    assert dev.Send(PREFILL, Ack(((0, 99),))) in actions
    assert [note.what for note in of(dev.Note, actions)] == ["cold_stalled"]


def test_a_prefill_rank_with_less_patience_has_its_slots_back_in_time() -> None:
    """`slot_aside` is its own: whatever this rank does with a slot ends by the smaller patience."""
    half = replace(room(), sources=(replace(room().sources[0], patience=0.5),))
    rooms = decode()
    rooms.handle(half, 0.0)
    rooms.handle(dev.Tick(), TIMES.stall / 2)
    assert rooms.machine._rooms[10].wants
    rooms.handle(dev.Tick(), TIMES.stall + 0.1)
    assert rooms.machine._rooms[10].cold == "stalled"
    for slots, limit, reason in ((8, TIMES.read / 2, "read"), (0, TIMES.unread / 2, "slots")):
        rooms = decode()
        for _ in range(8 if not slots else 0):
            rooms.machine.slots._free.popleft()
        rooms.handle(half, 0.0)
        rooms.handle(ready(), 0.0)
        for tick in range(1, 101):
            rooms.handle(dev.Tick(), tick * (limit - 0.01) / 100)
        assert rooms.machine._rooms[10].wants
        rooms.handle(dev.Tick(), limit)
        assert rooms.machine._rooms[10].cold == reason


@pytest.mark.parametrize(
    ("page_size", "tokens", "warm"),
    [(1, 8, False), (8, 8, False), (9, 8, True), (1, 0, False), (16, 0, False)],
)
def test_a_prompt_that_ends_before_its_last_page_is_refused(
    page_size: int, tokens: int, warm: bool
) -> None:
    """Rows behind that end would be another request's, in a warm room."""
    rooms = decode()
    rooms.handle(room(page_size=page_size), 0.0)
    announced = (Announced(0, 99, tokens),) if tokens else ()
    message = Ready(ROOM, 10, 0, 0, announced, last=True)
    actions = rooms.handle(dev.Received(PREFILL, message), 0.0)
    assert bool(of(dev.StartRead, actions)) is warm
    assert bool(of(dev.Clear, actions)) is not warm


def test_a_late_read_is_not_used() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    (read,) = of(dev.StartRead, rooms.handle(ready(), 0.0))
    for tick in range(1, 60):
        rooms.handle(dev.Tick(), tick * TIMES.read / 59)
    actions = rooms.handle(dev.ReadEnded(read.read), TIMES.read + 0.1)
    assert of(dev.Unpack, actions) == []
    assert dev.Send(PREFILL, Ack(((0, 99),))) in actions


def test_a_doubled_ready_is_not_acknowledged_while_the_first_is_read() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    (read,) = of(dev.StartRead, rooms.handle(ready(), 0.0))
    rooms.handle(dev.CloseRoom(10), 0.1)
    assert not of(dev.Send, rooms.handle(ready(), 0.2))
    acks = of(dev.Send, rooms.handle(dev.ReadEnded(read.read), 0.3))
    assert [send.message for send in acks] == [Ack(((0, 99),))]


@pytest.mark.parametrize("answered", [False, True])
def test_a_fail_names_its_reader_to_a_peer_that_has_not_answered(answered: bool) -> None:
    """To one that has, it would end the next request of this number too."""
    rooms = decode()
    rooms.handle(room(), 0.0)
    if answered:
        rooms.handle(ready(), 0.0)
    sent = [send.message for send in of(dev.Send, rooms.handle(dev.CloseRoom(10, "failed"), 0.1))]
    (found,) = [message for message in sent if isinstance(message, Fail)]
    assert found.reader == (None if answered else READER)


def test_more_slots_than_an_ack_holds_are_all_acknowledged() -> None:
    rooms = decode().machine
    slots = [(slot, slot + 1) for slot in range(2 * MAX_LIST)]
    for first in (0, MAX_LIST):
        announced = tuple(Announced(*one, 1) for one in slots[first : first + MAX_LIST])
        rooms.handle(dev.Received(PREFILL, Ready(ROOM, 10, 0, 0, announced, last=False)), 0.0)
    acks = [send.message.slots for send in of(dev.Send, rooms.actions())]
    assert max(map(len, acks)) <= MAX_LIST
    assert [one for ack in acks for one in ack] == slots


def test_nothing_is_held_against_a_peer_that_is_gone() -> None:
    """Nor for it. Its last segment is announced and waits to be read."""
    rooms = decode()
    for generation in range(STRIKES):
        rooms.handle(room(generation), 0.0)
        rooms.handle(dev.PeerLost(PREFILL), 0.0)
    assert rooms.machine.breaker.open_peers() == [PREFILL]
    rooms = decode()
    for generation in range(2 * STRIKES):
        rooms.handle(room(generation), 0.0)
        for segment in range(2 * (generation == STRIKES)):
            rooms.handle(ready(segment, generation), 0.0)
        actions = rooms.handle(dev.PeerLost(PREFILL, gone=True), 0.0)
        assert [note.what for note in of(dev.Note, actions)] == ["cold_lost"]
    assert not rooms.machine.breaker._states
    rooms.handle(room(100), 0.0)
    rooms.handle(dev.PeerLost(PREFILL), 0.0)
    assert rooms.machine.breaker._states
    rooms.handle(dev.PeerLost(PREFILL, gone=True), 0.0)
    assert not rooms.machine.breaker._states


@pytest.mark.parametrize("arrived", [0.0, 4.0])
def test_draft_kv_that_does_not_come_is_cleared_and_the_request_goes_on(arrived: float) -> None:
    """The clock starts with the target, however long that took."""
    rooms, late = decode(), arrived + TIMES.shortest_wait
    rooms.handle(room(), 0.0)
    rooms.handle(dev.TargetArrived(10), arrived)
    assert rooms.handle(dev.Tick(), late - 0.01) == []
    (clear,) = of(dev.Clear, rooms.handle(dev.Tick(), late))
    assert (clear.first_token, clear.end) == (0, 16)
    (verdict,) = of(
        dev.Verdict, rooms.handle(dev.Copied((clear.job,), dev.Result.DONE), late + 0.1)
    )
    assert verdict.state is dev.State.COLD


def test_each_step_of_a_segment_is_progress() -> None:
    """Announced, read, in place: the room waits anew."""
    rooms, step = decode(), 0.9 * TIMES.shortest_wait
    rooms.handle(room(), 0.0)
    rooms.handle(dev.TargetArrived(10), 0.0)
    (read,) = of(dev.StartRead, rooms.handle(ready(), step))
    assert rooms.handle(dev.Tick(), 2 * step) == []
    (unpack,) = of(dev.Unpack, rooms.handle(dev.ReadEnded(read.read), 2 * step))
    assert rooms.handle(dev.Tick(), 3 * step) == []
    rooms.handle(dev.Copied((unpack.job,), dev.Result.DONE), 3 * step)
    assert rooms.handle(dev.Tick(), 4 * step) == []


def test_rows_that_are_in_place_are_not_cleared() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    (read,) = of(dev.StartRead, rooms.handle(ready(), 0.0))
    (unpack,) = of(dev.Unpack, rooms.handle(dev.ReadEnded(read.read), 0.0))
    rooms.handle(dev.Copied((unpack.job,), dev.Result.DONE), 0.0)
    rooms.handle(dev.TargetArrived(10), 0.0)
    (clear,) = of(dev.Clear, rooms.handle(dev.Tick(), TIMES.longest_wait))
    assert (clear.first_token, clear.end) == (8, 16)


def test_a_forward_that_still_runs_is_waited_for() -> None:
    rooms = decode()
    rooms.handle(room(pending=True), 0.0)
    (read,) = of(dev.StartRead, rooms.handle(ready(), 0.0))
    assert of(dev.Unpack, rooms.handle(dev.ReadEnded(read.read), 0.0)) == []
    assert of(dev.Unpack, rooms.handle(dev.ForwardDone(10), 0.1))


def wait_in_vain(rooms: Driven, generation: int, now: float) -> float:
    rooms.handle(room(generation), now)
    rooms.handle(dev.TargetArrived(generation), now)
    now += TIMES.longest_wait
    rooms.handle(dev.Tick(), now)
    rooms.handle(dev.CloseRoom(generation), now)
    return now


def test_a_warm_room_without_rows_says_nothing_of_its_peer() -> None:
    """Its prefix was all there: no read has succeeded."""
    rooms, now = decode(), 0.0
    for generation in (1, 2, 3):
        now = wait_in_vain(rooms, generation, now)
        rooms.handle(replace(room(10 + generation), first_token=16), now)
        last = Ready(ROOM, 10 + generation, 0, 16, (), True)
        actions = rooms.handle(dev.Received(PREFILL, last), now)
        assert generation == 3 or of(dev.Verdict, actions)[0].state is dev.State.WARM
        rooms.handle(dev.CloseRoom(10 + generation), now)
    assert rooms.machine.breaker.open_peers() == [PREFILL]
    (send,) = of(dev.Send, rooms.handle(room(20), now + 1.0))
    assert send.message.wanted == range(4), "a probe"
    (send,) = of(dev.Send, rooms.handle(room(21), now + 1.0))
    assert not send.message.wanted, "cold at once"
    rooms.handle(dev.CloseRoom(20), now + 1.0)  # its client has hung up
    (send,) = of(dev.Send, rooms.handle(room(22), now + 1.0))
    assert send.message.wanted == range(4), "the next probe"


def test_invented_readers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all connections, and those of one request."""
    monkeypatch.setattr(waiting, "MAX_ALL", 8)
    monkeypatch.setattr(prefill_module, "MAX_WAITING", 8)
    rooms = prefill()
    rooms.handle(pev.Begin(1, ROOM), 0.0)
    for number in range(50):
        rooms.handle(opened(100 + number, b"open%04d" % number, room=ROOM + 1), 0.0)
        for room in (ROOM, ROOM + 2):
            gone = fail(room, number, "closed", reader=b"fail%04d" % number)
            rooms.handle(pev.Received(b"c", gone), 0.0)
    assert rooms.left()["waiting"] == 8
    assert len(rooms.machine._uses[1].absent) == 8


def test_readers_that_one_connection_invents_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING", 8)
    rooms, invented = prefill(), list[str]()
    for number in range(20):
        message = opened(100 + number, b"open%04d" % number).message
        refused = of(pev.Send, rooms.handle(pev.Received(b"c", message), 0.0))
        invented += [action.message.code for action in refused]
        gone = fail(ROOM + 1, number, "closed", reader=b"fail%04d" % number)
        rooms.handle(pev.Received(b"d", gone), 0.0)
    assert rooms.left()["waiting"] == 8 + 8
    assert invented == ["full"] * 12
    rooms.handle(pev.ConnectionLost(b"c"), 0.0)
    assert rooms.left()["waiting"] == 8 + 8
    assert of(pev.Send, rooms.handle(opened(10, room=ROOM + 2), 0.0)) == []
    rooms.handle(pev.Begin(1, ROOM + 2), 0.0)
    (pack,) = of(pev.PackJob, rooms.handle(pev.AddChunk(1, 0, 8, last=True), 0.0))
    assert pack.handle == 1


def test_an_end_is_known_over_the_next_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all places of the former are taken: an OPEN that came has one, and its end too."""
    monkeypatch.setattr(waiting, "MAX_WAITING", 2)
    rooms = prefill()
    rooms.handle(opened(10), 0.0)
    for room in (ROOM + 1, ROOM + 2):  # their OPENs never came; for the second there is no place
        lost = fail(room, 9, "closed", reader=READER)
        rooms.handle(pev.Received(b"connection" + READER, lost), 0.0)
    assert rooms.left()["waiting"] == 2
    rooms.handle(pev.Received(b"new", fail(ROOM, 10, "closed", reader=READER)), 0.1)
    again = opened(20).message
    assert rooms.handle(pev.Received(b"new", again), 0.2) == []
    for use, packs in ((1, 0), (2, 1)):
        rooms.handle(pev.Begin(use, ROOM), 0.3)
        actions = rooms.handle(pev.AddChunk(use, 0, 8, last=True), 0.3)
        assert len(of(pev.PackJob, actions)) == packs, "the first request was the ended one"
        rooms.handle(pev.End(use, ""), 0.4)


def test_clients_that_hang_up_early_cost_their_reader_no_request() -> None:
    """Fifty a second, for the ten minutes that their requests may still come."""
    rooms = prefill()
    for number in range(30000):
        now = number / 50
        rooms.handle(opened(10 + number, room=ROOM + number), now)
        gone = fail(ROOM + number, 10 + number, "closed")
        rooms.handle(pev.Received(b"connection" + READER, gone), now)
    assert of(pev.Send, rooms.handle(opened(1 << 40, room=1), 600.0)) == []
    rooms.handle(pev.Begin(1, 1), 600.0)
    assert of(pev.PackJob, rooms.handle(pev.AddChunk(1, 0, 8, last=True), 600.0))
    rooms.handle(pev.End(1), 600.0)
    for second in range(601, 1300):
        rooms.handle(pev.Tick(), float(second))
    assert "waiting" not in rooms.left()


def test_segments_of_one_message_are_read_and_acknowledged_together() -> None:
    rooms = Driven(DecodeMachine(READER, SlotPool(16, TIMES), 1 << 20, TIMES))
    source = dev.Source(PREFILL, range(4), 1, slots=16, segment_tokens=10)
    rooms.handle(dev.OpenRoom(10, ROOM, (source,), 0, 32), 0.0)
    announced = tuple(Announced(slot, 90 + slot, 8) for slot in range(4))
    message = Ready(ROOM, 10, 0, 0, announced, last=True)
    reads = of(dev.StartRead, rooms.handle(dev.Received(PREFILL, message), 0.1))
    assert [len(read.ranges) for read in reads] == [2, 2], "half of its quota of four"
    actions = rooms.handle(dev.ReadEnded(reads[1].read), 0.2)
    assert dev.Send(PREFILL, Ack(((2, 92), (3, 93)))) in actions
    assert [copy.first_token for copy in of(dev.Unpack, actions)] == [16, 24]


# ---------------------------------------------------------------- numbers that come again


@pytest.mark.parametrize("lost", [False, True])
def test_a_room_whose_reader_has_ended_does_not_wait_for_it(lost: bool) -> None:
    rooms = prefill()
    if not lost:
        rooms.handle(opened(1), 0.0)
    reader = READER if lost else None
    rooms.handle(pev.Received(b"c", fail(ROOM, 1, "closed", reader=reader)), 0.0)
    actions = rooms.handle(pev.Begin(1, ROOM), 0.1) + rooms.handle(pev.TargetSent(1), 0.1)
    assert uses_of(actions) == [1]


@pytest.mark.parametrize("lost", [(), ("OPEN 1", "OPEN 2"), ("FAIL 1", "OPEN 2")])
@pytest.mark.parametrize("late", [0.1, 300.0])
def test_each_request_that_a_reader_ended_may_still_come(late: float, lost: tuple[str]) -> None:
    """Its OPEN of the same number is for the request behind all of them, however late they are."""
    rooms = prefill()
    for generation in (1, 2):
        if f"OPEN {generation}" not in lost:
            rooms.handle(opened(generation), 0.0)
        if f"FAIL {generation}" not in lost:
            reader = READER if lost else None  # it has no answer yet
            failed = fail(ROOM, generation, "closed", reader=reader)
            rooms.handle(pev.Received(b"c", failed), 0.0)
    rooms.handle(opened(3), 0.0)
    for second in range(int(late)):
        rooms.handle(pev.Tick(), float(second))
    for use, packs in ((1, 0), (2, 0), (3, 1)):
        rooms.handle(pev.Begin(use, ROOM), late)
        actions = rooms.handle(pev.AddChunk(use, 0, 8, True, use), late)
        assert len(of(pev.PackJob, actions)) == packs
        rooms.handle(pev.End(use), late)
    assert wrong_books(rooms.machine) == []
