"""The two state machines driven by hand: rules that a reader should find without the simulator."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from msgspec.structs import replace

from sglang_mixkv.channel.messages import NO_SLOT, Ack, Open, Ready, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as dev
from sglang_mixkv.decode.breaker import STRIKES
from sglang_mixkv.decode.rooms import Rooms as DecodeRooms
from sglang_mixkv.prefill import events as pev
from sglang_mixkv.prefill import rooms as prefill_module
from sglang_mixkv.prefill import waiting
from sglang_mixkv.prefill.rooms import Rooms as PrefillRooms

PREFILL, READER, OTHER = b"prefill_", b"reader_0", b"reader_1"
ROOM, TIMES = 7, Times()


def prefill(slots: int = 8) -> PrefillRooms:
    return PrefillRooms(PREFILL, range(4), lambda heads, size: 10, SlotPool(slots, TIMES), TIMES)


def opened(
    generation: int, reader: bytes = READER, readers: int = 1, room: int = ROOM
) -> pev.Received:
    message = Open(2, room, generation, PREFILL, reader, readers, (0, 4), 0, 1 << 20)
    return pev.Received(b"connection" + reader, message)


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def test_a_lost_open_is_not_mistaken_for_the_next_requests() -> None:
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(opened(11, OTHER, readers=2), 0.0)
    rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0)
    gone = fail(ROOM, 10, "closed", reader=READER)  # its OPEN never came
    rooms.handle(pev.Received(b"new", gone), 0.3)
    actions = rooms.handle(opened(20), 0.5)
    assert of(pev.Pack, actions) == []
    rooms.handle(pev.End(0), 0.6)
    rooms.handle(pev.Begin(1, ROOM), 0.7)
    (pack,) = of(pev.Pack, rooms.handle(pev.AddChunk(1, 0, 8, last=True), 0.8))
    assert pack.use == 1


def test_a_generation_names_one_part() -> None:
    """Readers draw theirs apart; the second of two that are equal is not served."""
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(opened(10, READER, readers=2), 0.0)
    rooms.handle(opened(10, OTHER, readers=2), 0.0)
    assert rooms.opened(0) == (opened(10, READER, readers=2).message,)
    rooms.handle(pev.End(0), 0.1)
    assert (rooms.left(), list(rooms.check())) == ({}, [])


def test_success_waits_for_packing_and_for_nothing_else() -> None:
    """Not for reads, and not for ACKs."""
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    (pack,) = of(
        pev.Pack,
        rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0) + rooms.handle(opened(10), 0.0),
    )
    assert of(pev.Settled, rooms.handle(pev.TargetSent(0), 0.0)) == []
    assert of(pev.Settled, rooms.handle(pev.Packed(pack.job), 0.1)) == [pev.Settled(0)]
    assert rooms.left()["offered"] == 1


def test_packing_that_ends_before_sglangs_transfer_is_settled_then() -> None:
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0)
    (pack,) = of(pev.Pack, rooms.handle(opened(10), 0.0))
    assert of(pev.Settled, rooms.handle(pev.Packed(pack.job), 0.1)) == [pev.Settled(0)]
    assert of(pev.Settled, rooms.handle(pev.TargetSent(0), 0.2)) == []


def test_a_lost_open_may_have_told_of_more_readers() -> None:
    """They have the time of SGLang's transfer."""
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    gone = pev.Received(b"new", fail(ROOM, 10, "closed", reader=READER))
    assert of(pev.Settled, rooms.handle(gone, 0.0)) == []
    assert rooms.opened(0) == ()  # it says nothing of where target KV comes from
    rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0)
    (pack,) = of(pev.Pack, rooms.handle(opened(11, OTHER, readers=2), 0.1))
    assert of(pev.Settled, rooms.handle(pev.Packed(pack.job), 0.2)) == [pev.Settled(0)]
    assert rooms.opened(0) == (opened(11, OTHER, readers=2).message,)


def test_a_room_whose_open_was_lost_does_not_wait_for_it() -> None:
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(pev.Received(b"new", fail(ROOM, 10, "closed", reader=READER)), 0.0)
    assert of(pev.Settled, rooms.handle(pev.TargetSent(0), 0.1)) == [pev.Settled(0)]


def test_nobody_opens_and_the_request_goes_on() -> None:
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0)
    rooms.handle(pev.TargetSent(0), 0.0)
    assert rooms.handle(pev.Tick(), TIMES.packing * 0.9) == []
    actions = rooms.handle(pev.Tick(), TIMES.packing)
    assert of(pev.Settled, actions) == [pev.Settled(0)]
    assert [note.what for note in of(pev.Note, actions)] == ["unopened"]


def test_a_slot_rests_while_its_rank_does() -> None:
    """A stopped process sends its READY when it goes on: time that it stood still is no time."""
    rooms = prefill()
    rooms.handle(pev.Begin(0, ROOM), 0.0)
    rooms.handle(pev.AddChunk(0, 0, 8, last=True), 0.0)
    (pack,) = of(pev.Pack, rooms.handle(opened(10), 0.0))
    rooms.handle(pev.Packed(pack.job), 0.0)
    rooms.handle(pev.Tick(), 1000.0)
    assert rooms.left()["offered"] == 1
    for second in range(1001, 1061):
        rooms.handle(pev.Tick(), second)
    assert "offered" not in rooms.left()


def decode() -> DecodeRooms:
    return DecodeRooms(READER, SlotPool(8, TIMES), 1 << 20, TIMES)


def room(generation: int = 10, **more: Any) -> dev.OpenRoom:
    source = dev.Source(PREFILL, range(4), 1, slots=8, segment_tokens=10)
    return dev.OpenRoom(generation, ROOM, (source,), 0, 16, **more)


def ready(segment: int = 0, generation: int = 10, count: int = 8) -> dev.Received:
    last = segment == 1
    message = Ready(ROOM, generation, segment, segment, 99, 8 * segment, count, last)
    return dev.Received(PREFILL, message)


def test_a_thread_that_stood_still_drops_what_it_was_sent_before() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    actions = rooms.handle(ready(), TIMES.stall + 0.1)
    assert of(dev.StartRead, actions) == []
    assert dev.Send(PREFILL, Ack(0, 99)) in actions
    assert [note.what for note in of(dev.Note, actions)] == ["cold_stalled"]


def test_a_late_read_is_not_used() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    (read,) = of(dev.StartRead, rooms.handle(ready(), 0.0))
    for tick in range(1, 60):
        rooms.handle(dev.Tick(), tick * TIMES.read / 59)
    actions = rooms.handle(dev.ReadDone(read.read), TIMES.read + 0.1)
    assert of(dev.Unpack, actions) == []
    assert dev.Send(PREFILL, Ack(0, 99)) in actions


def test_nothing_is_held_against_a_peer_that_is_gone() -> None:
    """Nor for it. Its last segment is announced and waits to be read."""
    rooms = decode()
    for generation in range(STRIKES):
        rooms.handle(room(generation), 0.0)
        rooms.handle(dev.PeerLost(PREFILL), 0.0)
    assert rooms.breaker.open_peers() == [PREFILL]
    rooms = decode()
    for generation in range(2 * STRIKES):
        rooms.handle(room(generation), 0.0)
        for segment in range(2 * (generation == STRIKES)):
            rooms.handle(ready(segment, generation), 0.0)
        actions = rooms.handle(dev.PeerLost(PREFILL, gone=True), 0.0)
        assert [note.what for note in of(dev.Note, actions)] == ["cold_lost"]
    assert not rooms.breaker._states
    rooms.handle(room(100), 0.0)
    rooms.handle(dev.PeerLost(PREFILL), 0.0)
    assert rooms.breaker._states
    rooms.handle(dev.PeerLost(PREFILL, gone=True), 0.0)
    assert not rooms.breaker._states


def test_draft_kv_that_does_not_come_is_cleared_and_the_request_goes_on() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    rooms.handle(dev.TargetArrived(10), 0.0)
    assert rooms.handle(dev.Tick(), TIMES.shortest_wait * 0.9) == []
    (clear,) = of(dev.Clear, rooms.handle(dev.Tick(), TIMES.shortest_wait))
    assert (clear.first_token, clear.end) == (0, 16)
    (verdict,) = of(dev.Verdict, rooms.handle(dev.JobDone(clear.job, dev.Result.DONE), 0.4))
    assert verdict.state is dev.State.COLD


def test_rows_that_are_in_place_are_not_cleared() -> None:
    rooms = decode()
    rooms.handle(room(), 0.0)
    (read,) = of(dev.StartRead, rooms.handle(ready(), 0.0))
    (unpack,) = of(dev.Unpack, rooms.handle(dev.ReadDone(read.read), 0.0))
    rooms.handle(dev.JobDone(unpack.job, dev.Result.DONE), 0.0)
    rooms.handle(dev.TargetArrived(10), 0.0)
    (clear,) = of(dev.Clear, rooms.handle(dev.Tick(), TIMES.longest_wait))
    assert (clear.first_token, clear.end) == (8, 16)


def test_a_forward_that_still_runs_is_waited_for() -> None:
    rooms = decode()
    rooms.handle(room(pending=True), 0.0)
    (read,) = of(dev.StartRead, rooms.handle(ready(), 0.0))
    assert of(dev.Unpack, rooms.handle(dev.ReadDone(read.read), 0.0)) == []
    assert of(dev.Unpack, rooms.handle(dev.ForwardDone(10), 0.1))


def wait_in_vain(rooms: DecodeRooms, generation: int, now: float) -> float:
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
        last = Ready(ROOM, 10 + generation, 0, NO_SLOT, 99, 16, 0, True)
        actions = rooms.handle(dev.Received(PREFILL, last), now)
        assert generation == 3 or of(dev.Verdict, actions)[0].state is dev.State.WARM
        rooms.handle(dev.CloseRoom(10 + generation), now)
    assert rooms.breaker.open_peers() == [PREFILL]


def test_three_deadlines_open_the_breaker_and_one_room_probes() -> None:
    rooms, now = decode(), 0.0
    for generation in (1, 2, 3):
        now = wait_in_vain(rooms, generation, now)
    (send,) = of(dev.Send, rooms.handle(room(4), now))
    assert not send.message.wanted, "cold at once"
    rooms.handle(dev.CloseRoom(4), now)
    (send,) = of(dev.Send, rooms.handle(room(5), now + 1.0))
    assert send.message.wanted == range(4), "a probe"
    (send,) = of(dev.Send, rooms.handle(room(6), now + 1.0))
    assert not send.message.wanted


def test_invented_readers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_ALL", 8)
    monkeypatch.setattr(prefill_module, "MAX_WAITING", 8)
    rooms = prefill()
    for number in range(50):
        rooms.handle(opened(100 + number, b"open%04d" % number), 0.0)
        gone = fail(ROOM + 1, number, "closed", reader=b"fail%04d" % number)
        rooms.handle(pev.Received(b"c", gone), 0.0)
    assert rooms.left()["waiting"] == 8
    rooms.handle(pev.Begin(1, ROOM + 2), 0.0)
    for number in range(50):
        gone = fail(ROOM + 2, number, "closed", reader=b"fail%04d" % number)
        rooms.handle(pev.Received(b"c", gone), 0.0)
    assert len(rooms._uses[1].absent) == 8


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
    (pack,) = of(pev.Pack, rooms.handle(pev.AddChunk(1, 0, 8, last=True), 0.0))
    assert pack.use == 1


def test_an_end_is_known_over_the_next_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all places of the former are taken: what has ended keeps that of its OPEN."""
    monkeypatch.setattr(waiting, "MAX_WAITING", 2)
    rooms = prefill()
    rooms.handle(opened(10), 0.0)
    for room in (ROOM + 1, ROOM + 2):  # their OPENs never came; for the second there is no place
        lost = fail(room, 9, "closed", reader=READER)
        rooms.handle(pev.Received(b"connection" + READER, lost), 0.0)
    rooms.handle(pev.Received(b"new", fail(ROOM, 10, "closed", reader=READER)), 0.1)
    again = opened(20).message
    assert rooms.handle(pev.Received(b"new", again), 0.2) == []
    for use, packs in ((1, 0), (2, 1)):
        rooms.handle(pev.Begin(use, ROOM), 0.3)
        actions = rooms.handle(pev.AddChunk(use, 0, 8, last=True), 0.3)
        assert len(of(pev.Pack, actions)) == packs, "the first request was the one that has ended"
        rooms.handle(pev.End(use, ""), 0.4)


def test_what_invented_readers_leave_slows_nobody_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a request or a tick does looks at all of it."""
    monkeypatch.setattr(waiting, "MAX_ALL", 1 << 15)
    rooms = prefill()

    def seconds() -> float:
        began = time.monotonic()
        for number in range(200):
            rooms.handle(opened(next(generations), room=1 << 30), 0.0)
            rooms.handle(pev.Begin(number, 1 << 30), 0.0)
            rooms.handle(pev.End(number, ""), 0.0)
            rooms.handle(pev.Tick(), 0.0)
        return time.monotonic() - began

    generations = itertools.count(1 << 40)
    before = min(seconds() for _ in range(3))
    for number in range(waiting.MAX_ALL // 2 - 1):
        reader = number.to_bytes(8, "big")
        rooms.handle(opened(1000 + number, reader, room=1000 + number), 0.0)
        gone = fail(1 << 20 | number, 1 << 20 | number, "closed", reader=reader)
        rooms.handle(pev.Received(b"c" + reader, gone), 0.0)
    assert min(seconds() for _ in range(3)) < 8 * before  # not some fifty times
