r"""A prefill rank's state machine: events in, actions out, time as an argument. No I/O.

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

from sglang_mixkv.channel.messages import NO_SLOT, Ack, Fail, Open, Ready, draw, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.prefill import events as ev
from sglang_mixkv.prefill.packing import Packing
from sglang_mixkv.prefill.parts import Absent, Part, Room, refusal
from sglang_mixkv.prefill.waiting import MAX_ALL, MAX_WAITING, Ended, Queue

STEP = 1.0  # by so much at most a rank's clock goes on between two events


class Rooms:
    """All rooms of one prefill rank.

    `heads`: those of the drafter on this rank. `segment_tokens`, `draw_stamp`: see Packing.
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
        self.slots = slots
        self._packing = Packing(segment_tokens, slots, draw_stamp)
        self._uses: dict[ev.UseNumber, Room] = {}
        self._current: dict[int, Room] = {}  # by number: that of the newest sender
        self._parts: dict[int, Part] = {}  # by generation, as long as they have a room or wait
        self._early, self._ended = Queue(), Ended()
        self._out: list[ev.Action] = []
        self._clock = 0.0
        self._seen: float | None = None

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Actions, in the order in which they must be done."""
        self._advance(now)
        _HANDLERS[type(event)](self, event)
        for started in self._packing.start(self._clock):
            if isinstance(started, ev.Pack):
                self._out.append(started)
            else:
                self._announce(*started)
        actions, self._out = self._out, []
        return actions

    def _advance(self, now: float) -> None:
        """A clock that stands still while this process does: a slot's time without an ACK counts
        from when its READY went out, and a stopped process sends it only when it goes on."""
        if self._seen is not None:
            self._clock += min(max(0.0, now - self._seen), STEP)
        self._seen = now

    def opened(self, use: ev.UseNumber) -> tuple[Open, ...]:
        """The OPENs of this request's readers that have come, in no order."""
        room = self._uses.get(use)
        parts = room.parts.values() if room is not None else ()
        return tuple(part.opened for part in parts)

    # -- SGLang's side

    def _begin(self, event: ev.Begin) -> None:
        stale = self._current.get(event.room)
        if stale is not None:
            self._end_parts(stale, "aborted", "another request has its room number")
        room = Room(event.room, event.use, self._clock)
        self._current[event.room] = self._uses[event.use] = room
        room.absent = self._ended.take(event.room)
        for part in self._early.take(event.room):
            if part.reader not in room.absent and room.missing > 0:
                self._join(room, part)
            else:  # for a later request with this number
                self._early.put(part)
        self._settle(room)

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
                self._packing.add(part)

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
        if self._current.get(room.bootstrap_room) is room:
            del self._current[room.bootstrap_room]

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
        if why := self._refusal(connection, opened):
            self._note(*why, opened.reader)
            self._send(connection, fail(opened.room, opened.generation, *why))
            return
        bootstrap_room, reader, room = opened.room, opened.reader, self._current.get(opened.room)
        in_room = room.generation(reader) if room is not None else -1
        early = self._early.get(bootstrap_room, reader)
        known = max(in_room, self._ended.generation(bootstrap_room, reader))
        known = max(known, early.opened.generation if early is not None else -1)
        if opened.generation <= known or opened.generation in self._parts:
            return  # doubled, late, or another part's: readers draw only 32 bits at random
        for part in (room.parts.get(reader) if room is not None else None, early):
            self._ended_by_reader(part)  # it has begun another request with this number
        part = self._parts[opened.generation] = Part(opened, connection, self._clock)
        if room is not None and in_room < 0 and not room.settled and room.missing > 0:
            self._join(room, part)
        else:
            self._early.put(part)
            self._ended.touch(bootstrap_room, reader, self._clock)

    def _refusal(self, connection: ev.Connection, opened: Open) -> tuple[str, str] | None:
        """A code and a detail where the OPEN cannot be served."""
        if found := refusal(opened, self._instance, self._heads):
            return found
        if opened.wanted and not self._packing.fits(opened):
            return "heads", "a token is larger than a slot; raise --mixkv-staging-mb"
        if self._early.is_full(connection) or self._ended.is_full(connection):
            return "full", f"{MAX_WAITING} of its rooms, or {MAX_ALL} in all, wait for requests"
        return None

    def _join(self, room: Room, part: Part) -> None:
        part.room = room
        room.parts[part.reader] = part
        room.progress = self._clock
        self._packing.add(part)
        self._settle(room)

    def _acknowledged(self, ack: Ack) -> None:
        if not self.slots.acknowledge(ack.slot, ack.stamp):
            self._note("unknown_ack", f"slot {ack.slot}")

    def _failed(self, connection: ev.Connection, message: Fail) -> None:
        part = self._parts.get(message.generation)
        if part is None and message.reader is not None:
            self._ended_unopened(connection, message, message.reader)
        self._ended_by_reader(part)

    def _ended_unopened(self, connection: ev.Connection, failed: Fail, reader: bytes) -> None:
        """Its OPEN was lost with its connection: how many readers there are is not known. Not noted
        where too many are: over that connection nothing is opened then."""
        bootstrap_room, generation = failed.room, failed.generation
        room = self._current.get(bootstrap_room)
        in_room = room.generation(reader) if room is not None else -1
        before = self._ended.generation(bootstrap_room, reader)
        if generation <= max(in_room, before):
            return  # doubled
        if room is not None and in_room < 0 and not room.settled:
            if len(room.absent) < MAX_WAITING:
                room.absent[reader] = Absent(generation)
                self._settle(room)
        elif before >= 0 or not self._ended.is_full(connection):
            absent = Absent(generation)
            self._ended.note(bootstrap_room, reader, absent, connection, self._clock)

    def _ended_by_reader(self, part: Part | None) -> None:
        if part is None:
            return
        self._over(part)
        bootstrap_room, reader, generation = part.opened.room, part.reader, part.opened.generation
        if self._early.get(bootstrap_room, reader) is part:
            self._early.remove(part)
            del self._parts[generation]
            absent = Absent(generation, part.opened.readers)
            self._ended.note(bootstrap_room, reader, absent, part.connection, self._clock)

    def _connection_lost(self, event: ev.ConnectionLost) -> None:
        for part in [p for p in self._parts.values() if p.connection == event.connection]:
            self._ended_by_reader(part)

    # -- parts

    def _over(self, part: Part) -> None:
        """Nothing more is packed, or offered, for this reader."""
        if not part.ended:
            part.over = True
            for ready in part.packed.values():
                self.slots.free(ready.slot)
            part.packed.clear()
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
        if not room.settled and (given_up or room.all_ended):
            room.settled = True
            self._out.append(ev.Settled(room.use))

    # -- packing

    def _packed(self, event: ev.Packed) -> None:
        part, ready = self._packing.end(event)
        if not (part.over or event.error or event.closed):
            self._announce(part, ready)
            return
        self.slots.free(ready.slot)
        if not part.over:
            code = "aborted" if event.closed else "pack"
            self._fail_part(part, code, event.error or "the sender was ended")

    def _announce(self, part: Part, ready: Ready) -> None:
        """READYs leave in the order of the part's segments, whichever copy ends first: decode takes
        no other."""
        part.packed[ready.segment] = ready
        while part.offered in part.packed:
            self._offer(part, part.packed.pop(part.offered))

    def _offer(self, part: Part, ready: Ready) -> None:
        assert part.room is not None
        part.offered += 1
        part.room.progress = self._clock
        if ready.slot != NO_SLOT:
            self.slots.offer(ready.slot, ready.stamp, self._clock)
        self._send(part.connection, ready)
        if ready.last:
            part.complete = True
            self._settle(part.room)
        else:
            self._packing.add(part)

    def _action_failed(self, event: ev.ActionFailed) -> None:
        match event.action:
            case ev.Pack(job=job):
                self._packed(ev.Packed(job, error=event.detail))
            case ev.Send(connection=connection):
                self._connection_lost(ev.ConnectionLost(connection))

    # -- time

    def _tick(self, event: ev.Tick) -> None:
        for room in self._uses.values():
            if room.sent is None or room.settled:
                continue
            if self._clock - max(room.sent, room.progress) >= self._times.packing:
                self._give_up(room)
        limit = self._clock - self._times.early_room
        for part in self._early.take_older(limit):
            del self._parts[part.opened.generation]
            self._note("early", f"room {part.opened.room}: no request came", part.reader)
        self._ended.expire(limit)
        for slot in self.slots.expire(self._clock):
            self._note("expired", f"slot {slot} was never acknowledged")

    def _give_up(self, room: Room) -> None:
        if room.missing > 0:
            self._note(
                "unopened", f"room {room.bootstrap_room}: {room.missing} readers have not opened it"
            )
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
            "rooms": len(self._uses), "waiting": len(self._early) + len(self._ended),
            "jobs": len(self._packing), "offered": self.slots.offered, "parts": len(self._parts),
        }  # fmt: skip
        return {name: count for name, count in found.items() if count}

    def check(self) -> Iterator[str]:
        """What is wrong with the books, at any time."""
        yield from self.slots.check()
        used = len(self._packing) + self.slots.offered
        used += sum(len(part.packed) for part in self._parts.values())
        if self.slots.free_slots + used != self.slots.count:
            yield f"slots: {self.slots.free_slots} free, {used} in use of {self.slots.count}"
        with_room = sum(len(room.parts) for room in self._uses.values())
        if with_room + len(self._early) != len(self._parts):
            yield f"{len(self._parts)} parts, {with_room} in rooms, {len(self._early)} waiting"


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.Begin: Rooms._begin,
    ev.AddChunk: Rooms._add_chunk,
    ev.ChunkWritten: Rooms._chunk_written,
    ev.TargetSent: Rooms._target_sent,
    ev.End: Rooms._end,
    ev.Received: Rooms._received,
    ev.ConnectionLost: Rooms._connection_lost,
    ev.Packed: Rooms._packed,
    ev.ActionFailed: Rooms._action_failed,
    ev.Tick: Rooms._tick,
}
