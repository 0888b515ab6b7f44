"""The rules of the two state machines, shown by single calls without the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from rig.channel.driven import SLOTS, TOKENS, Prefill
from rig.channel.invariants import outstanding, strikes, violations

from sglang_mixkv.channel.messages import MAX_LIST, Ack, Announced, Open, Ready, draws, fail
from sglang_mixkv.channel.slots import SlotPool, quota_of, share_of, slots_of
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode import transfer as decode_transfer
from sglang_mixkv.decode.breaker import STRIKES
from sglang_mixkv.decode.machine import Machine as DecodeMachine
from sglang_mixkv.decode.transfer import Opened, Source
from sglang_mixkv.prefill import machine as prefill_module
from sglang_mixkv.prefill import transfer as prefill_transfer
from sglang_mixkv.prefill.machine import Machine as PrefillMachine

PREFILL, READER, OTHER = b"prefill_", b"reader_0", b"reader_1"
ROOM, TIMES = 7, Times()


class Driven:
    """A machine whose `handle` makes a call and returns the actions, each copy separately."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def handle(self, now: float, method: Callable[..., None], *args: Any, **more: Any) -> list[Any]:
        self.machine.advance(now)
        method(*args, **more)
        found = []
        for action in self.machine.actions():
            match action:
                case dact.StartCopies(jobs):
                    found += jobs
                case _:
                    found.append(action)
        return found


def prefill(slots: int = 8) -> Driven:
    pool = SlotPool(slots, TIMES)
    draw = draws().__next__
    return Driven(PrefillMachine(PREFILL, range(4), lambda heads, size: 10, pool, TIMES, draw))


def opened(
    generation: int, reader: bytes = READER, readers: int = 1, room: int = ROOM
) -> tuple[bytes, Open]:
    message = Open(3, room, generation, PREFILL, reader, readers, (0, 4), 0, 1 << 20)
    return b"connection" + reader, message


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def test_a_generation_identifies_one_part() -> None:
    """A generation identifies one reader's transfer. A second OPEN with it is not served.

    Readers draw their generations independently.
    """
    rooms = prefill()
    rooms.handle(0.0, rooms.machine.begin, 0, ROOM)
    rooms.handle(0.0, rooms.machine.received, *opened(10, READER, readers=2))
    rooms.handle(0.0, rooms.machine.received, *opened(10, OTHER, readers=2))
    ended = of(dact.Send, rooms.handle(0.1, rooms.machine.end, 0))
    assert [send.peer for send in ended] == [b"connection" + READER]
    assert (outstanding(rooms.machine), violations(rooms.machine)) == ({}, [])


def test_a_restored_prefill_rank_releases_all_pages_at_once() -> None:
    """A restored prefill rank ends all transfers, and waits for no reader.

    Readers that want no heads are still served.
    """
    rank = Prefill()
    rank.begin("opened", 1, TOKENS)
    rank.begin("by one of two", 2, TOKENS)
    rank.begin("by none", 3, TOKENS)
    rank.machine._packing.start = lambda: ()
    rank.open(1)
    rank.open(2, readers=2)
    rank.open(4)
    rank.do(rank.machine.restored)
    assert rank.fails == {1: "snapshot", 2: "snapshot", 4: "snapshot"}
    assert set(rank.pages_released) == {"opened", "by one of two", "by none"}
    rank.begin("early", 4, TOKENS)
    rank.begin("later", 5, TOKENS)
    rank.open(5)
    assert rank.fails[5] == "snapshot"
    assert set(rank.pages_released) >= {"early", "later"}
    rank.do(rank.machine.received, READER, replace(rank.message(6), heads=(0, 0)))
    assert 6 not in rank.fails
    assert rank.sent == {}
    assert rank.violations == []


def test_a_slot_does_not_expire_during_a_stop() -> None:
    """A stop of the prefill rank does not count toward the time after which a slot expires.

    A stopped process may send its READY only when it continues.
    """
    rooms = prefill()
    rooms.handle(0.0, rooms.machine.begin, 0, ROOM)
    rooms.handle(0.0, rooms.machine.add_chunk, 0, 0, 8, last=True)
    (pack,) = of(prefill_transfer.Segment, rooms.handle(0.0, rooms.machine.received, *opened(10)))
    rooms.handle(0.0, rooms.machine.copied, (pack,))
    rooms.handle(1000.0, rooms.machine.tick)
    assert outstanding(rooms.machine)["published"] == 1
    for second in range(1001, 1061):
        rooms.handle(second, rooms.machine.tick)
    assert "published" not in outstanding(rooms.machine)


@pytest.mark.parametrize(("wanted", "first"), [(0, 8), (8, 8), (10, 10)])
def test_packing_starts_at_the_chunks_first_token(wanted: int, first: int) -> None:
    """Packing starts at the first token of the chunk, even if the reader wants earlier ones.

    The chunk's pages do not hold earlier tokens.
    """
    rooms = prefill()
    connection, message = opened(10)
    rooms.handle(0.0, rooms.machine.begin, 0, ROOM)
    rooms.handle(0.0, rooms.machine.add_chunk, 0, 8, 8, last=True)
    message = replace(message, first_token=wanted)
    actions = rooms.handle(0.0, rooms.machine.received, connection, message)
    (pack,) = of(prefill_transfer.Segment, actions)
    assert (pack.first, pack.count) == (first, 16 - first)


def decode() -> Driven:
    return Driven(DecodeMachine(READER, SlotPool(8, TIMES), 1 << 20, TIMES))


def room(generation: int = 10, number: int | None = None, **more: Any) -> Opened:
    source = Source(PREFILL, range(4), 1, slots=8, segment_tokens=10)
    number = generation if number is None else number
    return Opened(generation, number, (source,), 0, 16, **more)


def ready(segment: int = 0, generation: int = 10, count: int = 8) -> Ready:
    announced = Announced(segment, 99, count)
    return Ready(ROOM, generation, segment, 8 * segment, (announced,), segment == 1)


def test_a_smaller_patience_of_prefill_limits_decode() -> None:
    """The smaller patience of both sides limits a stop, a read, and the wait for a local slot.

    Prefill reuses a slot after its own `slot_aside`.
    """
    half = replace(room(), sources=(replace(room().sources[0], patience=0.5),))
    rooms = decode()
    rooms.handle(0.0, rooms.machine.open, half)
    rooms.handle(TIMES.stall / 2, rooms.machine.tick)
    assert rooms.machine._requests[10].wants
    rooms.handle(TIMES.stall + 0.1, rooms.machine.tick)
    assert rooms.machine._requests[10].cold == "stalled"
    for slots, limit, reason in ((8, TIMES.read / 2, "read"), (0, TIMES.unread / 2, "slots")):
        rooms = decode()
        for _ in range(8 if not slots else 0):
            rooms.machine.slots.free_slots.popleft()
        rooms.handle(0.0, rooms.machine.open, half)
        rooms.handle(0.0, rooms.machine.ready, PREFILL, ready())
        for tick in range(1, 101):
            rooms.handle(tick * (limit - 0.01) / 100, rooms.machine.tick)
        assert rooms.machine._requests[10].wants
        rooms.handle(limit, rooms.machine.tick)
        assert rooms.machine._requests[10].cold == reason


def announce(segment: int, token: int, *segments: tuple[int, int], last: bool = False) -> Ready:
    """Make a READY. `segments`: the slot and the number of tokens of each segment."""
    announced = tuple(Announced(slot, 99 + slot, tokens) for slot, tokens in segments)
    return Ready(ROOM, 10, segment, token, announced, last)


EARLY = announce(0, 0, (0, 8), last=True)
WHOLE = announce(0, 0, (7, 10), (0, 6), last=True)
RIGHT: list[tuple[int | None, Ready]] = [(None, WHOLE), (1, WHOLE), (9, EARLY)]
WRONG: dict[str, tuple[Any, ...]] = {
    "a segment is missing": (1, announce(1, 0, (0, 8))),
    "tokens are missing": (1, announce(0, 1, (0, 8))),
    "more tokens than fit a slot": (1, announce(0, 0, (0, 11))),
    "a slot that does not exist": (1, announce(0, 0, (0, 8), (8, 8), last=True)),
    "rows after the room's last one": (1, announce(0, 0, (0, 8), (1, 9), last=True)),
    "no segment": (1, announce(0, 0)),
    "an end before the last page": (8, EARLY),
    "an end before the last token": (None, announce(0, 0, (0, 10), (1, 5), last=True)),
    "an end without a row": (16, announce(0, 0, last=True)),
    "a segment after the end": (9, EARLY, announce(1, 8, (1, 1))),
}


@pytest.mark.parametrize(("page_size", "message"), RIGHT)
def test_a_valid_ready_is_read(page_size: int | None, message: Ready) -> None:
    """A valid READY starts a read. The default page size is one token."""
    rooms = decode()
    opened = room(**{"page_size": page_size} if page_size else {})
    rooms.handle(0.0, rooms.machine.open, opened)
    assert of(dact.StartRead, rooms.handle(0.0, rooms.machine.ready, PREFILL, message))


@pytest.mark.parametrize("case", WRONG)
def test_an_impossible_announcement_makes_its_room_cold(case: str) -> None:
    """A READY with an impossible announcement makes its room cold and is acknowledged.

    If a decode rank accepted an early end, a warm room would keep rows of another request.
    """
    page_size, *messages = WRONG[case]
    rooms = decode()
    opened = room(**{"page_size": page_size} if page_size else {})
    rooms.handle(0.0, rooms.machine.open, opened)
    for message in messages:
        actions = rooms.handle(0.0, rooms.machine.ready, PREFILL, message)
    assert rooms.machine._requests[10].cold == "protocol"
    assert not of(dact.StartRead, actions)
    acks = [send.message for send in of(dact.Send, actions) if isinstance(send.message, Ack)]
    announced = tuple((one.slot, one.stamp) for one in message.segments)
    assert acks == ([Ack(announced)] if announced else [])


def test_a_source_has_no_slots_by_default() -> None:
    rooms = decode()
    source = Source(PREFILL, range(4), 1, segment_tokens=10)
    rooms.handle(0.0, rooms.machine.open, replace(room(), sources=(source,)))
    rooms.handle(0.0, rooms.machine.ready, PREFILL, ready())
    assert rooms.machine._requests[10].cold == "protocol"


def test_a_fail_with_an_unknown_code_makes_a_room_cold() -> None:
    rooms = decode()
    rooms.handle(0.0, rooms.machine.open, room())
    rooms.handle(0.0, rooms.machine.failed, PREFILL, fail(ROOM, 10, "zzz", "no reason"))
    assert rooms.machine._requests[10].cold == "prefill_other"


def test_many_slots_are_acknowledged_in_several_acks() -> None:
    rooms = decode()
    slots = [(slot, slot + 1) for slot in range(2 * MAX_LIST)]
    for first in (0, MAX_LIST):
        announced = tuple(Announced(*one, 1) for one in slots[first : first + MAX_LIST])
        rooms.machine.ready(PREFILL, Ready(ROOM, 10, 0, 0, announced, last=False))
    acks = [send.message.slots for send in of(dact.Send, rooms.machine.actions())]
    assert max(map(len, acks)) <= MAX_LIST
    assert [one for ack in acks for one in ack] == slots


def test_a_peer_that_is_gone_keeps_no_strikes() -> None:
    """No strikes and no resources are retained for a peer that is gone.

    In one case, the peer's last segment is already announced and waits to be read.
    """
    rooms = decode()
    for generation in range(STRIKES):
        rooms.handle(0.0, rooms.machine.open, room(generation))
        rooms.handle(0.0, rooms.machine.peer_lost, PREFILL)
    assert rooms.machine.breaker.open_peers() == [PREFILL]
    rooms = decode()
    for generation in range(STRIKES):
        rooms.handle(0.0, rooms.machine.open, room(generation))
        (read,) = of(
            dact.StartRead, rooms.handle(0.0, rooms.machine.ready, PREFILL, ready(0, generation))
        )
        rooms.handle(0.0, rooms.machine.read_ended, read, "failed")
    assert rooms.machine.breaker.open_peers() == [PREFILL]
    rooms = decode()
    for generation in range(2 * STRIKES):
        rooms.handle(0.0, rooms.machine.open, room(generation))
        for segment in range(2 * (generation == STRIKES)):
            rooms.handle(0.0, rooms.machine.ready, PREFILL, ready(segment, generation))
        actions = rooms.handle(0.0, rooms.machine.peer_lost, PREFILL, gone=True)
        assert [note.what for note in of(dact.Note, actions)] == ["lost"]
    assert not strikes(rooms.machine)
    rooms.handle(0.0, rooms.machine.open, room(100))
    rooms.handle(0.0, rooms.machine.peer_lost, PREFILL)
    assert strikes(rooms.machine)
    rooms.handle(0.0, rooms.machine.peer_lost, PREFILL, gone=True)
    assert not strikes(rooms.machine)


def time_out(rooms: Driven, generation: int, now: float) -> float:
    rooms.handle(now, rooms.machine.open, room(generation))
    rooms.handle(now, rooms.machine.target_arrived, generation)
    now += TIMES.longest_wait
    rooms.handle(now, rooms.machine.tick)
    rooms.handle(now, rooms.machine.close, generation)
    return now


def test_a_warm_room_without_rows_closes_no_breaker() -> None:
    """A warm room whose rows all come from the cached prefix does not close an open breaker.

    The room proves nothing about the peer, since no read has succeeded.
    """
    rooms, now = decode(), 0.0
    for generation in (1, 2, 3):
        now = time_out(rooms, generation, now)
        rooms.handle(now, rooms.machine.open, replace(room(10 + generation), first_token=16))
        last = Ready(ROOM, 10 + generation, 0, 16, (), True)
        actions = rooms.handle(now, rooms.machine.ready, PREFILL, last)
        assert generation == 3 or of(dact.Verdict, actions)[0].state is dact.State.WARM
        rooms.handle(now, rooms.machine.close, 10 + generation)
    assert rooms.machine.breaker.open_peers() == [PREFILL]
    (send,) = of(dact.Send, rooms.handle(now + 1.0, rooms.machine.open, room(20)))
    assert send.message.wanted == range(4), "room 20 is a probe"
    (send,) = of(dact.Send, rooms.handle(now + 1.0, rooms.machine.open, room(21)))
    assert not send.message.wanted, "room 21 goes cold at once"
    rooms.handle(now + 1.0, rooms.machine.close, 20)  # as after an abort by the client
    (send,) = of(dact.Send, rooms.handle(now + 1.0, rooms.machine.open, room(22)))
    assert send.message.wanted == range(4), "room 22 is the next probe"


def test_segments_of_one_ready_share_reads_and_acks() -> None:
    rooms = Driven(DecodeMachine(READER, SlotPool(16, TIMES), 1 << 20, TIMES))
    source = Source(PREFILL, range(4), 1, slots=16, segment_tokens=10)
    rooms.handle(0.0, rooms.machine.open, Opened(10, ROOM, (source,), 0, 32))
    announced = tuple(Announced(slot, 90 + slot, 8) for slot in range(4))
    message = Ready(ROOM, 10, 0, 0, announced, last=True)
    reads = of(dact.StartRead, rooms.handle(0.1, rooms.machine.ready, PREFILL, message))
    assert [len(read.segments) for read in reads] == [2, 2], "a read takes half a quota of four"
    actions = rooms.handle(0.2, rooms.machine.read_ended, reads[1])
    assert dact.Send(PREFILL, Ack(((2, 92), (3, 93)))) in actions
    assert [segment.first for segment in of(decode_transfer.Segment, actions)] == [16, 24]


@pytest.mark.parametrize(("limit", "refused"), [("MAX_OPEN", "c"), ("MAX_ALL", "cd")])
def test_readers_without_a_request_are_limited(
    monkeypatch: pytest.MonkeyPatch, limit: str, refused: str
) -> None:
    """The number of readers that wait for a request is limited, per connection and in all.

    Closed readers count until they expire, since their requests may still come.
    """
    monkeypatch.setattr(prefill_module, limit, 8)
    rooms, codes = prefill(), dict[str, list[str]]()
    for connection in "cd":
        for number in range(20 if connection == "c" else 1):
            generation = 100 * ord(connection) + number
            _, message = opened(generation, b"open%04d" % number, room=generation)
            found = rooms.handle(0.0, rooms.machine.received, connection.encode(), message)
            codes.setdefault(connection, []).extend(a.message.code for a in of(dact.Send, found))
            gone = fail(generation, generation, "closed", "")
            rooms.handle(0.0, rooms.machine.received, connection.encode(), gone)
    assert codes["c"] == ["full"] * 12
    assert codes["d"] == ["full"] * ("d" in refused)
    assert violations(rooms.machine) == []
    for second in range(1, 602):
        rooms.handle(float(second), rooms.machine.tick)
    assert (outstanding(rooms.machine), violations(rooms.machine)) == ({}, [])


@pytest.mark.parametrize(("warm", "later"), [(True, 1.0), (False, 1.0), (False, 601.0)])
def test_a_repeated_room_number_is_fetched_after_a_warm_room(warm: bool, later: float) -> None:
    """A repeated room number is fetched only after a warm request or after 600 s.

    Otherwise the earlier request's OPEN may have been lost, and prefill may send its KV to the next
    OPEN.
    """
    rooms = decode()
    rooms.handle(0.0, rooms.machine.open, replace(room(10, ROOM), first_token=16))
    if warm:
        rooms.handle(0.0, rooms.machine.ready, PREFILL, Ready(ROOM, 10, 0, 16, (), True))
    rooms.handle(0.1, rooms.machine.close, 10, "" if warm else "failed")
    (send,) = of(dact.Send, rooms.handle(later, rooms.machine.open, room(11, ROOM)))
    assert send.message.wanted == (range(4) if warm or later > 600 else range(0))


# ---------------------------------------------------------------- room numbers used again


def orders(*lines: str) -> Iterator[tuple[str, ...]]:
    """Yield all ways to merge these sequences of calls."""
    if not any(lines):
        yield ()
    for n, line in enumerate(lines):
        if line:
            for rest in orders(*lines[:n], line[1:], *lines[n + 1 :]):
                yield (line[0], *rest)


@pytest.mark.parametrize("former", ["bct", "bc", "b"])
def test_a_reused_room_number_gets_its_own_kv_in_any_order(former: str) -> None:
    """A request that reuses a room number gets its own draft KV in every possible order of events.

    The target and the end of the former request may come after all events of the next one. Decode
    prevents the remaining orders (`RecentRooms`).
    """
    count = 0
    for order in orders(former + "e", "BCT", "o", "O"):
        at = order.index
        if at("o") > min(at("O"), at("B"), at("e")) or at("b") > min(at("B"), at("O")):
            continue
        count += 1
        rank = Prefill()
        for event in order:
            handle, generation = ("b", 1) if event in "bcteo" else ("B", 2)
            match event.lower():
                case "b":
                    rank.do(rank.machine.begin, handle, ROOM)
                case "c":
                    rank.do(rank.machine.add_chunk, handle, 0, 16, last=True, pages=handle)
                case "t":
                    rank.do(rank.machine.target_sent, handle)
                case "e":
                    rank.do(rank.machine.end, handle)
                case "o":
                    rank.open(ROOM, generation=generation)
        assert rank.pages.get(2) == {"B"}, order
        assert rank.pages.get(1, {"b"}) == {"b"}, order
        assert "B" in rank.pages_released, order
        rank.do(rank.machine.end, "B")
        rank.until(rank.now + 601.0, 1.0)
        assert (outstanding(rank.machine), rank.violations) == ({}, []), order
    assert count > 2


def test_calls_for_a_sender_that_has_ended_do_nothing() -> None:
    """SGLang's scheduler may poll a sender once more after its request has ended."""
    rank = Prefill()
    rank.open(ROOM, READER, 1)
    rank.begin("b", ROOM, 16, "b")
    rank.do(rank.machine.end, "b")
    sent = dict(rank.sent)
    for call in rank.machine.target_sent, rank.machine.end:
        rank.do(call, "b")
    rank.do(rank.machine.add_chunk, "b", 16, 16, last=True, pages="late")
    assert (rank.sent, rank.violations) == (sent, [])
    rank.wait(601.0)
    assert outstanding(rank.machine) == {}


@pytest.mark.parametrize("given_up", [False, True])
def test_an_open_after_giving_up_is_for_the_next_request(given_up: bool) -> None:
    """An OPEN that comes after its request was given up belongs to the next request.

    A given-up request is released without the missing reader, and until then waits for it.
    """
    rank = Prefill()
    rank.open(ROOM, OTHER, 1, readers=2)
    rank.begin("b", ROOM, 16, "b")
    rank.do(rank.machine.target_sent, "b")
    rank.wait(1.001 if given_up else 0.999)
    assert ("b" in rank.pages_released) == given_up
    rank.open(ROOM, READER, 2, readers=2)
    assert rank.pages.get(2) == (None if given_up else {"b"})
    rank.do(rank.machine.end, "b")
    rank.begin("B", ROOM, 16, "B")
    assert rank.pages.get(2) == ({"B"} if given_up else {"b"})


def test_no_owner_exceeds_its_share() -> None:
    """No owner exceeds its share of the slots, even if owners hold their slots for long."""
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
        assert max(held) <= share_of(SLOTS, owners), "an owner exceeds its share"


@pytest.mark.parametrize(("staging_mb", "each"), [(256, 0), (512, 0), (683, 1), (2048, 3)])
def test_128_readers_get_equal_shares_of_the_slots(staging_mb: int, each: int) -> None:
    """128 readers that wait at the same time get equal shares of the slots.

    `each`: the number of slots that every reader holds while all want more. If it is 0, some
    readers wait until others have read all of their segments.
    """
    rank, segments = Prefill(slots_of(staging_mb)[0]), 20
    readers = {number: b"reader%03d" % number for number in range(1, 129)}
    for number, reader in readers.items():
        rank.slow.add(reader)
        rank.open(number, reader)
    for number in readers:
        rank.tell(rank.machine.begin, number, number)
        rank.tell(rank.machine.add_chunk, number, 0, segments * TOKENS, True)
    rank.act()
    assert max(rank.sent.values()) < segments * TOKENS
    while rank.unread:
        held = [rank.slots.held.get(reader, 0) for reader in readers.values()]
        sent = [rank.sent.get(number, 0) // TOKENS for number in readers]
        if max(sent) < segments:
            assert (min(held), max(held)) == (each, each or 1)
            assert not each or max(sent) - min(sent) <= 1, "the readers do not take turns"
        rank.acknowledge(1)
    assert rank.sent == dict.fromkeys(readers, segments * TOKENS)


def test_an_unsent_message_fails_only_its_own_part() -> None:
    """A message that cannot be created fails only its own transfer.

    The slots of a failed READY are free at once, and those of a failed ACK expire. Other requests
    of the same reader go on.
    """
    rank = Prefill()
    rank.slow.add(READER)
    for number in (1, 2):
        rank.open(number)
        rank.begin(number, number, 40)
    stamps = {slot: stamp for _, (slot, stamp) in rank.unread}
    assert len(stamps) == len(rank.slots._published) == 8
    first = tuple(Announced(*slot, 10) for _, slot in rank.unread[:4])
    ready = Ready(1, 1, 0, 0, first, last=True)
    for _ in range(2):
        rank.do(rank.machine.on_action_failed, dact.Send(READER, ready), MemoryError())
        assert len(rank.slots._published) == 4
        assert not rank.slots._signs[True], "the reader has read nothing"
    rank.open(3)
    rank.begin(3, 3, 400)
    rank.do(rank.machine.on_action_failed, dact.Send(READER, fail(3, 3, "slow", "")), MemoryError())
    sent = rank.sent[3]
    rank.acknowledge()
    assert rank.sent[3] == sent < 400
    rank.open(4)
    rank.begin(4, 4, 40)
    assert rank.sent[4] == 40
    other = decode()
    assert (
        other.handle(
            0.0, other.machine.on_action_failed, dact.Send(PREFILL, Ack(())), MemoryError()
        )
        == []
    )


@pytest.mark.parametrize(
    ("readers", "second"), [(1, OTHER), (1, READER), (2, READER)], ids=["all here", "one", "again"]
)
def test_an_extra_open_is_for_the_next_request(readers: int, second: bytes) -> None:
    """A second OPEN for a room number belongs to the next request with that number.

    Either the same reader or all readers have already opened the current request, whose packing has
    not ended.
    """
    rank = Prefill()
    rank.do(rank.machine.begin, "b", ROOM)
    rank.open(ROOM, READER, 1, readers=readers)
    rank.open(ROOM, second, 2, readers=readers)
    rank.do(rank.machine.add_chunk, "b", 0, 16, last=True, pages="b")
    assert 2 not in rank.pages
    assert (1 in rank.pages) == (second == OTHER)
    rank.begin("B", ROOM, 16, "B")
    assert rank.pages[2] == {"B"}
    rank.tell(rank.machine.end, "b")
    rank.do(rank.machine.end, "B")
    assert (outstanding(rank.machine), rank.violations) == ({}, [])


def test_reusing_a_room_number_ends_its_former_request() -> None:
    """A request that reuses a room number ends the former request, whose reader gets a Fail."""
    rank = Prefill()
    rank.do(rank.machine.begin, "b", ROOM)
    rank.open(ROOM, READER, 1)
    rank.do(rank.machine.begin, "B", ROOM)
    assert rank.fails == {1: "aborted"}
    assert rank.pages_released == {"b": rank.now}


def test_a_repeated_early_open_replaces_the_former() -> None:
    rank = Prefill()
    for generation in (1, 2, 3):
        rank.open(ROOM, READER, generation)
        rank.open(ROOM, READER, 1)  # a delayed duplicate
    assert (outstanding(rank.machine), rank.violations) == ({"waiting": 1, "transfers": 1}, [])
    rank.begin("b", ROOM, 16, "b")
    assert rank.pages == {3: {"b"}}
    rank.do(rank.machine.end, "b")
    assert (outstanding(rank.machine), rank.violations) == ({}, [])
