"""The two state machines driven by hand: rules that a reader should find without the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from rig.books import wrong_books
from rig.driven import Prefill

from sglang_mixkv.channel.messages import MAX_LIST, Ack, Announced, Open, Ready, draws, fail
from sglang_mixkv.channel.slots import SLOTS, SlotPool, quota_of, share_of
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as dev
from sglang_mixkv.decode.breaker import STRIKES
from sglang_mixkv.decode.machine import Machine as DecodeMachine
from sglang_mixkv.prefill import events as pev
from sglang_mixkv.prefill import machine as prefill_module
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
    draw = draws().__next__
    return Driven(PrefillMachine(PREFILL, range(4), lambda heads, size: 10, pool, TIMES, draw))


def opened(
    generation: int, reader: bytes = READER, readers: int = 1, room: int = ROOM
) -> pev.Received:
    message = Open(3, room, generation, PREFILL, reader, readers, (0, 4), 0, 1 << 20)
    return pev.Received(b"connection" + reader, message)


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def test_a_generation_names_one_part() -> None:
    """Readers draw theirs apart; the second of two that are equal is not served."""
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(opened(10, READER, readers=2), 0.0)
    rooms.handle(opened(10, OTHER, readers=2), 0.0)
    assert set(rooms.machine._uses[0].parts) == {READER}
    rooms.handle(pev.End(0), 0.1)
    assert (rooms.left(), wrong_books(rooms.machine)) == ({}, [])


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


def room(generation: int = 10, number: int | None = None, **more: Any) -> dev.OpenRoom:
    source = dev.Source(PREFILL, range(4), 1, slots=8, segment_tokens=10)
    number = generation if number is None else number
    return dev.OpenRoom(generation, number, (source,), 0, 16, **more)


def ready(segment: int = 0, generation: int = 10, count: int = 8) -> dev.Received:
    announced = Announced(segment, 99, count)
    message = Ready(ROOM, generation, segment, 8 * segment, (announced,), segment == 1)
    return dev.Received(PREFILL, message)


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


def announce(segment: int, token: int, *segments: tuple[int, int], last: bool = False) -> Ready:
    """`segments`: slot and tokens of each."""
    announced = tuple(Announced(slot, 99 + slot, tokens) for slot, tokens in segments)
    return Ready(ROOM, 10, segment, token, announced, last)


EARLY = announce(0, 0, (0, 8), last=True)
WHOLE = announce(0, 0, (7, 10), (0, 6), last=True)
RIGHT: list[tuple[int | None, Ready]] = [(None, WHOLE), (1, WHOLE), (9, EARLY)]
WRONG: dict[str, tuple[Any, ...]] = {
    "a segment is left out": (1, announce(1, 0, (0, 8))),
    "tokens are left out": (1, announce(0, 1, (0, 8))),
    "more tokens than fit a slot": (1, announce(0, 0, (0, 11))),
    "a slot that is not there": (1, announce(0, 0, (0, 8), (8, 8), last=True)),
    "rows behind the room's": (1, announce(0, 0, (0, 8), (1, 9), last=True)),
    "nothing": (1, announce(0, 0)),
    "an end before the last page": (8, EARLY),
    "an end before the last token": (None, announce(0, 0, (0, 10), (1, 5), last=True)),
    "an end without a row": (16, announce(0, 0, last=True)),
    "more behind the end": (9, EARLY, announce(1, 8, (1, 1))),
}


@pytest.mark.parametrize(("page_size", "message"), RIGHT)
def test_what_a_prefill_rank_sends_is_read(page_size: int | None, message: Ready) -> None:
    """A page has one token unless the room says otherwise."""
    rooms = decode()
    rooms.handle(room(**{"page_size": page_size} if page_size else {}), 0.0)
    assert of(dev.StartRead, rooms.handle(dev.Received(PREFILL, message), 0.0))


@pytest.mark.parametrize("case", WRONG)
def test_what_no_prefill_rank_sends_is_not_read_and_the_room_cold(case: str) -> None:
    """Rows behind a prompt that seems to end early would be another request's, in a warm room."""
    page_size, *messages = WRONG[case]
    rooms = decode()
    rooms.handle(room(**{"page_size": page_size} if page_size else {}), 0.0)
    for message in messages:
        actions = rooms.handle(dev.Received(PREFILL, message), 0.0)
    assert rooms.machine._rooms[10].cold == "protocol"
    assert not of(dev.StartRead, actions)
    acks = [send.message for send in of(dev.Send, actions) if isinstance(send.message, Ack)]
    announced = tuple((one.slot, one.stamp) for one in message.segments)
    assert acks == ([Ack(announced)] if announced else [])


def test_a_fail_of_a_code_that_is_not_known_is_one_all_the_same() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    rooms.handle(dev.Received(PREFILL, fail(ROOM, 10, "zzz", "no reason")), 0.0)
    assert rooms.machine._rooms[10].cold == "prefill_other"


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
    for generation in range(STRIKES):
        rooms.handle(room(generation), 0.0)
        (read,) = of(dev.StartRead, rooms.handle(ready(0, generation), 0.0))
        rooms.handle(dev.ReadEnded(read.read, "failed"), 0.0)
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


@pytest.mark.parametrize(("limit", "refused"), [("MAX_OPEN", "c"), ("MAX_ALL", "cd")])
def test_invented_readers_are_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: str, refused: str
) -> None:
    """Of one connection, which leaves room for others, and of all. Ended ones count until their
    time is over, since their requests may still come."""
    monkeypatch.setattr(prefill_module, limit, 8)
    rooms, codes = prefill(), dict[str, list[str]]()
    for connection in "cd":
        for number in range(20 if connection == "c" else 1):
            generation = 100 * ord(connection) + number
            message = opened(generation, b"open%04d" % number, room=generation).message
            found = rooms.handle(pev.Received(connection.encode(), message), 0.0)
            codes.setdefault(connection, []).extend(a.message.code for a in of(pev.Send, found))
            gone = fail(generation, generation, "closed", "")
            rooms.handle(pev.Received(connection.encode(), gone), 0.0)
    assert codes["c"] == ["full"] * 12
    assert codes["d"] == ["full"] * ("d" in refused)
    assert wrong_books(rooms.machine) == []
    for second in range(1, 602):
        rooms.handle(pev.Tick(), float(second))
    assert (rooms.left(), rooms.machine._open) == ({}, {})


@pytest.mark.parametrize(("warm", "later"), [(True, 1.0), (False, 1.0), (False, 601.0)])
def test_a_number_is_fetched_again_behind_a_warm_request_alone(warm: bool, later: float) -> None:
    """The OPEN of another one may have been lost, and prefill take the next for it."""
    rooms = decode()
    rooms.handle(replace(room(10, ROOM), first_token=16), 0.0)
    if warm:
        rooms.handle(dev.Received(PREFILL, Ready(ROOM, 10, 0, 16, (), True)), 0.0)
    rooms.handle(dev.CloseRoom(10, "" if warm else "failed"), 0.1)
    (send,) = of(dev.Send, rooms.handle(room(11, ROOM), later))
    assert send.message.wanted == (range(4) if warm or later > 600 else range(0))


# ---------------------------------------------------------------- room numbers used again


def orders(*lines: str) -> Iterator[tuple[str, ...]]:
    """All ways to merge these sequences of events."""
    if not any(lines):
        yield ()
    for n, line in enumerate(lines):
        if line:
            for rest in orders(*lines[:n], line[1:], *lines[n + 1 :]):
                yield (line[0], *rest)


@pytest.mark.parametrize("former", ["bct", "bc", "b"])
def test_a_numbers_next_use_gets_its_draft_kv_in_any_order(former: str) -> None:
    """The end of the former use may be behind all of the next one's, and so may its target. The
    other orders are decode's to prevent (`Numbers`)."""
    count = 0
    for order in orders(former + "e", "BCT", "o", "O"):
        at = order.index
        if at("o") > min(at("O"), at("B"), at("e")) or at("b") > min(at("B"), at("O")):
            continue
        count += 1
        rank = Prefill()
        for event in order:
            use, generation = ("b", 1) if event in "bcteo" else ("B", 2)
            match event.lower():
                case "b":
                    rank.do(pev.Begin(use, ROOM))
                case "c":
                    rank.do(pev.AddChunk(use, 0, 16, last=True, pages=use))
                case "t":
                    rank.do(pev.TargetSent(use))
                case "e":
                    rank.do(pev.End(use))
                case "o":
                    rank.open(ROOM, generation=generation)
        assert rank.pages.get(2) == {"B"}, order
        assert rank.pages.get(1, {"b"}) == {"b"}, order
        assert "B" in rank.settled, order
        rank.do(pev.End("B"))
        rank.until(601.0, 1.0)
        assert (rank.machine.left(), rank.books) == ({}, []), order
    assert count > 2


@pytest.mark.parametrize("given_up", [False, True])
def test_an_open_behind_a_use_that_was_given_up_is_the_next_ones(given_up: bool) -> None:
    """It settled without this reader. Before, it waited for it."""
    rank = Prefill()
    rank.open(ROOM, OTHER, 1, readers=2)
    rank.begin("b", ROOM, 16, "b")
    rank.do(pev.TargetSent("b"))
    rank.wait(1.001 if given_up else 0.999)
    assert ("b" in rank.settled) == given_up
    rank.open(ROOM, READER, 2, readers=2)
    assert rank.pages.get(2) == (None if given_up else {"b"})
    rank.do(pev.End("b"))
    rank.begin("B", ROOM, 16, "B")
    assert rank.pages.get(2) == ({"B"} if given_up else {"b"})


def test_no_owner_has_more_than_its_share_however_long_it_holds() -> None:
    """Owners that take turns, and hold what they have."""
    for owners in range(1, 9):
        rank = Prefill()
        for number in range(1, 1 + owners):
            rank.slow.add(b"reader%02d" % number)
            rank.open(number, b"reader%02d" % number)
            rank.begin(number, number, 10_000)
        held = list(rank.slots.held.values())
        assert max(held) == quota_of(SLOTS)
        assert sum(held) == [32, 48, 49, 50, 51, 52, 53, 54][owners - 1]
        for _ in range(400):
            rank.acknowledge(1)
        held = list(rank.slots.held.values())
        assert len(held) == owners
        assert max(held) <= share_of(SLOTS, owners), "they share alike in the end"


def test_a_message_that_cannot_be_made_costs_its_own_part_alone() -> None:
    """Of a READY the slots are free at once, of an ACK they expire. Its reader is as before."""
    rank = Prefill()
    rank.slow.add(READER)
    for number in (1, 2):
        rank.open(number)
        rank.begin(number, number, 40)
    stamps = {slot: stamp for _, (slot, stamp) in rank.unread}
    assert len(stamps) == rank.slots.offered == 8
    first = tuple(Announced(*slot, 10) for _, slot in rank.unread[:4])
    ready = Ready(1, 1, 0, 0, first, last=True)
    event = pev.undone(pev.Send(READER, ready), "MemoryError")
    for _ in range(2):
        rank.do(event)
        assert rank.slots.offered == 4
        assert not rank.slots._signs[True], "its reader has read nothing"
    rank.open(3)
    rank.begin(3, 3, 400)
    rank.do(pev.undone(pev.Send(READER, fail(3, 3, "slow", "")), "MemoryError"))
    sent = rank.sent[3]
    rank.acknowledge()
    assert rank.sent[3] == sent < 400
    rank.open(4)
    rank.begin(4, 4, 40)
    assert rank.sent[4] == 40
    assert dev.undone(dev.Send(PREFILL, Ack(())), "MemoryError") is None


@pytest.mark.parametrize(
    ("readers", "second"), [(1, OTHER), (1, READER), (2, READER)], ids=["all here", "one", "again"]
)
def test_an_open_that_the_current_use_does_not_wait_for_is_the_next_ones(
    readers: int, second: bytes
) -> None:
    """Its reader has opened that, or all have. Packing has not ended."""
    rank = Prefill()
    rank.do(pev.Begin("b", ROOM))
    rank.open(ROOM, READER, 1, readers=readers)
    rank.open(ROOM, second, 2, readers=readers)
    rank.do(pev.AddChunk("b", 0, 16, last=True, pages="b"))
    assert 2 not in rank.pages
    assert (1 in rank.pages) == (second == OTHER)
    rank.begin("B", ROOM, 16, "B")
    assert rank.pages[2] == {"B"}
    rank.do(pev.End("b"), pev.End("B"))
    assert (rank.machine.left(), rank.books) == ({}, [])


def test_a_number_that_begins_again_ends_its_former_use_at_once() -> None:
    """Whose reader need not wait."""
    rank = Prefill()
    rank.do(pev.Begin("b", ROOM))
    rank.open(ROOM, READER, 1)
    rank.do(pev.Begin("B", ROOM))
    assert rank.fails == {1: "aborted"}
    assert rank.settled == {"b": 0.0}


def test_an_early_room_that_is_opened_again_has_the_later_part_alone() -> None:
    rank = Prefill()
    for generation in (1, 2, 3):
        rank.open(ROOM, READER, generation)
        rank.open(ROOM, READER, 1)  # late
    assert (rank.machine.left(), rank.books) == ({"waiting": 1, "parts": 1}, [])
    rank.begin("b", ROOM, 16, "b")
    assert rank.pages == {3: {"b"}}
    rank.do(pev.End("b"))
    assert (rank.machine.left(), rank.books) == ({}, [])
