"""A prefill rank's state machine: events in, actions out, time as an argument. No I/O.

A *room* is one request on this rank: one use of a room number by SGLang. A *part* is what one
reader, a decode rank, gets of it. An OPEN may come before SGLang's sender; its part waits for the
room then. Chunks wait in the room for their readers, and are cut into segments that fit a slot:

    part     opened --Pack--> packing --READY--> ... --last READY--> complete
                 \__________________ FAIL, either way ______________/  over

A room is *settled* when each of its readers has a part, and each part is complete or over. The
sender's Success waits for that and for nothing else, so that no page is given back while it is
packed. What is in slots then is read, and acknowledged, later. Packing that makes no progress
after SGLang's own transfer is given up: the reader is notified, the room settles, the request goes
on. Prefill never fails a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from sglang_mixkv.channel.messages import NO_SLOT, Ack, Fail, Open, Ready, draw, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.channel.turns import Turns
from sglang_mixkv.next.prefill import events as ev
from sglang_mixkv.next.prefill.early import MAX_EARLY, Early
from sglang_mixkv.next.prefill.parts import Part, Room

STEP = 1.0  # by so much at most a rank's clock goes on between two events


class Rooms:
    """All rooms of one prefill rank.

    `heads`: those of the drafter on this rank. `segment_tokens`: how many tokens of so many heads
    fit a slot here and one of so many bytes. `draw_stamp`: unlike any earlier number, and not to be
    guessed.
    """

    def __init__(
        self,
        instance: bytes,
        heads: range,
        segment_tokens: Callable[[int, int], int],
        slots: SlotPool,
        times: Times,
        draw_stamp: Callable[[], int] = draw,
    ) -> None:
        self._instance, self._heads, self._times = instance, heads, times
        self._segment_tokens, self._draw = segment_tokens, draw_stamp
        self.slots = slots
        self._uses: dict[ev.Use, Room] = {}
        self._current: dict[int, Room] = {}  # by number: that of the newest sender
        self._parts: dict[int, Part] = {}  # by generation, as long as they have a room or wait
        self._early: Early = Early()
        self._gone: Early = Early()  # parts that ended before their request was here
        self._turns: Turns[Part] = Turns()
        self._jobs: dict[int, tuple[Part, Ready]] = {}
        self._job = 0
        self._out: list[ev.Action] = []
        self._clock = 0.0
        self._seen: float | None = None

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Actions, in the order in which they must be done."""
        self._advance(now)
        _HANDLERS[type(event)](self, event)
        self._turns.serve(self._pack_segment)
        actions, self._out = self._out, []
        return actions

    def _advance(self, now: float) -> None:
        """A clock that stands still while this process does: a slot's time without an ACK counts
        from when its READY went out, and a stopped process sends it only when it goes on."""
        if self._seen is not None:
            self._clock += min(max(0.0, now - self._seen), STEP)
        self._seen = now

    # -- SGLang's side

    def _begin(self, event: ev.Begin) -> None:
        stale = self._current.get(event.room)
        if stale is not None:
            self._end_parts(stale, "aborted", "another request has its room number")
        room = Room(event.room, event.use, self._clock)
        self._current[event.room] = self._uses[event.use] = room
        for part in self._gone.take(event.room):
            self._join(room, part)
        newest_first = sorted(self._early.take(event.room), key=lambda part: -part.since)
        for part in newest_first:
            if room.missing > 0 and part.reader not in room.parts:
                self._join(room, part)
            else:  # for the next request with this number
                self._early.put(part)

    def _add_chunk(self, event: ev.AddChunk) -> None:
        room = self._uses.get(event.use)
        if room is not None:
            room.chunks.append(event)
            self._written(room, 0)

    def _chunk_written(self, event: ev.ChunkWritten) -> None:
        room = self._uses.get(event.use)
        if room is not None:
            self._written(room, 1)

    def _written(self, room: Room, chunks: int) -> None:
        if room.note_written(chunks):
            for part in room.parts.values():
                self._turns.add(part.reader, part.opened.generation, part)

    def _target_sent(self, event: ev.TargetSent) -> None:
        room = self._uses.get(event.use)
        if room is not None and room.sent is None:
            room.sent = self._clock
            self._settle(room)

    def _end(self, event: ev.End) -> None:
        room = self._uses.pop(event.use, None)
        if room is None:
            return
        self._end_parts(room, "aborted", event.reason or "the sender was cleared")
        for part in room.parts.values():
            del self._parts[part.opened.generation]
        if self._current.get(room.number) is room:
            del self._current[room.number]

    # -- readers

    def _received(self, event: ev.Received) -> None:
        match event.message:
            case Open():
                self._opened(event.connection, event.message)
            case Ack():
                self._acknowledged(event.message)
            case Fail():
                self._failed(event.connection, event.message)

    def _opened(self, connection: ev.Connection, opened: Open) -> None:
        if refusal := self._refusal(opened):
            self._note(*refusal, opened.reader)
            self._send(connection, fail(opened.room, opened.generation, *refusal))
            return
        room = self._current.get(opened.room)
        before = room.parts.get(opened.reader) if room is not None else None
        early = self._early.get(opened.room, opened.reader)
        later = [p for p in (before, early) if p and p.opened.generation >= opened.generation]
        if later or opened.generation in self._parts:
            return  # doubled, or late
        for part in (before, early):
            self._ended_by_reader(part)  # it has begun another request with this number
        part = self._parts[opened.generation] = Part(opened, connection, self._clock)
        if room is not None and before is None and not room.settled and room.missing > 0:
            self._join(room, part)
        else:
            self._early.put(part)

    def _refusal(self, opened: Open) -> tuple[str, str] | None:
        """A code and a detail where the OPEN cannot be served."""
        wanted, held = opened.wanted, self._heads
        if opened.prefill != self._instance:
            return "restarted", "this prefill rank is another instance than the one addressed"
        if wanted and not (held.start <= wanted.start and wanted.stop <= held.stop):
            return "heads", f"heads {list(opened.heads)} of a rank with {held.start}..{held.stop}"
        if wanted and self._segment_tokens(len(wanted), opened.slot_bytes) < 1:
            return "heads", "a token is larger than a slot; raise --mixkv-staging-mb"
        if self._early.is_full(opened.reader):
            return "full", f"{MAX_EARLY} rooms are open whose requests are not here"
        return None

    def _join(self, room: Room, part: Part) -> None:
        part.room = room
        room.parts[part.reader] = part
        room.progress = self._clock
        self._turns.add(part.reader, part.opened.generation, part)
        self._settle(room)

    def _acknowledged(self, ack: Ack) -> None:
        if not self.slots.acknowledge(ack.slot, ack.stamp):
            self._note("unknown_ack", f"slot {ack.slot}")

    def _failed(self, connection: ev.Connection, message: Fail) -> None:
        part = self._parts.get(message.generation)
        if part is None and message.reader is not None:
            part = self._lost_part(connection, message, message.reader)
        self._ended_by_reader(part)

    def _lost_part(self, connection: ev.Connection, message: Fail, reader: bytes) -> Part | None:
        """One whose OPEN was lost with its connection: it has its place, without heads."""
        room = self._current.get(message.room)
        if self._early.get(message.room, reader) or (room is not None and reader in room.parts):
            return None
        opened = Open(0, message.room, message.generation, self._instance, reader, 1, (0, 0), 0, 1)
        part = self._parts[message.generation] = Part(opened, connection, self._clock)
        if room is not None and not room.settled:
            self._join(room, part)
        else:
            self._early.put(part)
        return part

    def _ended_by_reader(self, part: Part | None) -> None:
        """One that ends before its request is here waits for it all the same, for a time: this
        reader's next OPEN of the number is for the next request."""
        if part is None:
            return
        self._over(part)
        number, reader = part.opened.room, part.reader
        if self._early.get(number, reader) is part:
            self._early.remove(part)
            self._forget(self._gone.get(number, reader))
            part.since = self._clock
            self._gone.put(part)
            if self._gone.is_full(reader):
                self._forget(part)

    def _forget(self, part: Part | None) -> None:
        """One that has ended, and no request came for."""
        if part is not None:
            self._gone.remove(part)
            del self._parts[part.opened.generation]

    def _connection_lost(self, event: ev.ConnectionLost) -> None:
        for part in [p for p in self._parts.values() if p.connection == event.connection]:
            self._ended_by_reader(part)

    # -- parts

    def _over(self, part: Part) -> None:
        """Nothing more is packed, or offered, for this reader."""
        if not part.ended:
            part.over = True
            if part.room is not None:
                self._settle(part.room)

    def _fail_part(self, part: Part, code: str, detail: str) -> None:
        self._note(code, detail, part.reader)
        self._send(part.connection, fail(part.opened.room, part.opened.generation, code, detail))
        self._over(part)

    def _end_parts(self, room: Room, code: str, detail: str) -> None:
        for part in room.parts.values():
            if not part.ended:
                self._fail_part(part, code, detail)

    def _settle(self, room: Room, given_up: bool = False) -> None:
        if room.sent is not None and not room.settled and (given_up or room.all_ended):
            room.settled = True
            self._out.append(ev.Settled(room.use))

    # -- packing

    def _pack_segment(self, part: Part) -> bool | None:
        """For Turns: True, one was begun; False, there is none; None, there is no slot."""
        chunk = None if part.ended else part.next_chunk()
        if chunk is None:
            return False
        if part.token >= chunk.first + chunk.count:
            if not part.packing:  # the last READY follows those before it
                self._offer(part, part.cut(NO_SLOT, self._draw(), 0)[-1])
            return False
        if not self.slots.can_take(part.reader, self._clock):
            return None
        slot = self.slots.take(part.reader, self._clock)
        heads = part.opened.wanted
        limit = self._segment_tokens(len(heads), part.opened.slot_bytes)
        chunk, offset, ready = part.cut(slot, self._draw(), limit)
        self._job += 1
        part.packing[self._job] = ready
        self._jobs[self._job] = part, ready
        self._out.append(
            ev.Pack(
                self._job, chunk.use, chunk.rows, offset, ready.count, heads, slot, ready.stamp,
                part.opened.checksum,
            )
        )  # fmt: skip
        return True

    def _packed(self, event: ev.Packed) -> None:
        part, ready = self._jobs.pop(event.job)
        del part.packing[event.job]
        if part.over or event.error:
            self.slots.free(ready.slot)
            if not part.over:
                self._fail_part(part, "pack", event.error)
            return
        self.slots.offer(ready.slot, ready.stamp, self._clock)
        self._offer(part, msgspec.structs.replace(ready, checksum=event.checksum))

    def _offer(self, part: Part, ready: Ready) -> None:
        assert part.room is not None
        part.room.progress = self._clock
        self._send(part.connection, ready)
        if ready.last:
            part.complete = True
            self._settle(part.room)
        else:
            self._turns.add(part.reader, part.opened.generation, part)

    # -- time

    def _tick(self, event: ev.Tick) -> None:
        for room in self._uses.values():
            if room.sent is None or room.settled:
                continue
            if self._clock - max(room.sent, room.progress) >= self._times.packing:
                self._give_up(room)
        for part in self._early:
            if self._clock - part.since < self._times.early_room:
                break
            self._note("early", f"room {part.opened.room}: no request came", part.reader)
            self._early.remove(part)
            del self._parts[part.opened.generation]
        for part in self._gone:
            if self._clock - part.since < self._times.slot_aside:
                break
            self._forget(part)
        for slot in self.slots.expire(self._clock):
            self._note("expired", f"slot {slot} was never acknowledged")

    def _give_up(self, room: Room) -> None:
        if room.missing > 0:
            self._note("unopened", f"room {room.number}: {room.missing} readers have not opened it")
        self._end_parts(room, "slow", "packing made no progress")
        self._settle(room, given_up=True)

    # -- output and books

    def _send(self, connection: ev.Connection, message: Ready | Fail) -> None:
        self._out.append(ev.Send(connection, message))

    def _note(self, what: str, detail: str, reader: bytes = b"") -> None:
        self._out.append(ev.Note(what, reader, detail))

    def left(self) -> dict[str, int]:
        """How much of what a rank at rest has none of."""
        found = {
            "rooms": len(self._uses), "early": len(self._early) + len(self._gone),
            "jobs": len(self._jobs), "offered": self.slots.offered, "parts": len(self._parts),
        }  # fmt: skip
        return {name: count for name, count in found.items() if count}

    def check(self) -> Iterator[str]:
        """What is wrong with the books, at any time."""
        yield from self.slots.check()
        used = len(self._jobs) + self.slots.offered
        if self.slots.free_slots + used != self.slots.count:
            yield f"slots: {self.slots.free_slots} free, {used} in use of {self.slots.count}"
        with_room = sum(len(room.parts) for room in self._uses.values())
        early = len(self._early) + len(self._gone)
        if with_room + early != len(self._parts):
            yield f"{len(self._parts)} parts, {with_room} in rooms and {early} early"


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.Begin: Rooms._begin,
    ev.AddChunk: Rooms._add_chunk,
    ev.ChunkWritten: Rooms._chunk_written,
    ev.TargetSent: Rooms._target_sent,
    ev.End: Rooms._end,
    ev.Received: Rooms._received,
    ev.ConnectionLost: Rooms._connection_lost,
    ev.Packed: Rooms._packed,
    ev.Tick: Rooms._tick,
}
