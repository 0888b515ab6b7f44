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

from collections.abc import Callable

from sglang_mixkv.channel.messages import Ack, Fail, Open, Ready, draw, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.prefill import events as ev
from sglang_mixkv.prefill.transfer import Absent, Packing, Part, Room, refusal
from sglang_mixkv.prefill.waiting import MAX_WAITING, Waiting

PAST = 1 << 12
"""Requests that have ended here and are remembered: a reader's FAIL, or a doubled OPEN, may be on
its way, and must not be taken for that of another request. Decode sends a FAIL where it does not
know yet that it has got all, as when its request ends while the last READY travels."""
STEP = 1.0  # a rank's clock advances by so much at most between two events


class Machine:
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
        self._uses: dict[ev.Use, Room] = {}
        self._current: dict[int, Room] = {}  # by number: that of the newest sender
        self._parts: dict[int, Part] = {}  # by generation, as long as they have a room or wait
        self._past: dict[int, None] = {}  # by generation, the oldest first
        self._waiting = Waiting()
        self._out: list[ev.Action] = []
        self._clock = 0.0
        self._seen: float | None = None

    def handle(self, event: ev.Event, now: float) -> None:
        """The clock stands still while this process does: a slot's time without an ACK counts from
        when its READY went out, and a stopped process sends it only when it goes on."""
        if self._seen is not None:
            self._clock += min(max(0.0, now - self._seen), STEP)
        self._seen = now
        _HANDLERS[type(event)](self, event)

    def actions(self) -> list[ev.Action]:
        """In the order in which they must be done."""
        packing = self._packing
        for part, ready in packing.announce(self._clock) if packing.announcing else ():
            assert part.room is not None
            part.room.progress = self._clock
            self._out.append(ev.Send(part.connection, ready))
            if ready.last:
                self._settle(part.room)
        if packing.turns.owners and (jobs := packing.start(self._clock)):
            self._out.append(ev.Pack(jobs))
        actions, self._out = self._out, []
        return actions

    # -- SGLang's side

    def _begin(self, event: ev.Begin) -> None:
        stale = self._current.get(event.room)
        if stale is not None:
            self._fail_parts(stale, "aborted", "another request has its room number")
        absent, parts = self._waiting.begin(event.room)
        room = Room(event.room, event.use, absent, self._clock)
        self._current[event.room] = self._uses[event.use] = room
        for part in parts:
            if room.missing > 0:
                self._join(room, part)
            else:  # for a later request with this number
                self._waiting.open(part, self._clock)
        self._settle(room)

    def _chunk(self, event: ev.AddChunk | ev.ChunkWritten) -> None:
        room = self._uses.get(event.use)
        if room is None:
            return
        if isinstance(event, ev.AddChunk):
            room.chunks.append(event)
        if room.note_written(isinstance(event, ev.ChunkWritten)):
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
        for part in room.parts.values():
            generation = part.opened.generation
            if not part.ended:
                self._fail(part, "aborted", event.reason or "the sender was cleared")
            del self._parts[generation]
            self._past[generation] = None
        while len(self._past) > PAST:
            del self._past[next(iter(self._past))]
        if self._current.get(room.number) is room:
            del self._current[room.number]

    # -- readers

    def _received(self, event: ev.Received) -> None:
        match event.message:
            case Open() as opened:
                self._opened(event.connection, opened)
            case Ack(slots):
                for slot, stamp in slots:
                    if not self.slots.acknowledge(slot, stamp):
                        self._out.append(ev.Note("unknown_ack", b"", f"slot {slot}"))
            case Fail() as failed:
                self._failed(event.connection, failed)

    def _opened(self, connection: ev.Connection, opened: Open) -> None:
        number, reader, generation = opened.room, opened.reader, opened.generation
        why = refusal(opened, self._instance, self._heads, self._packing.limit)
        if why:
            self._refuse(connection, opened, *why)
            return
        room = self._current.get(number)
        in_room = room.generation(reader) if room is not None else -1
        known = max(in_room, self._waiting.generation(number, reader))
        if generation <= known or generation in self._parts or generation in self._past:
            return  # doubled, or late
        former = room.parts.get(reader) if room is not None else None
        for part in (former, self._waiting.part(number, reader)):
            if part is not None:  # it has begun another request with this number
                self._ended_by_reader(part)
        part = Part(opened, connection, self._packing.limit(opened) if opened.wanted else 0)
        if room is not None and in_room < 0 and not room.settled and room.missing > 0:
            self._parts[generation] = part
            self._join(room, part)
        elif self._waiting.is_full(connection):
            self._refuse(connection, opened, "full", "too many of its rooms wait for requests")
        else:
            self._parts[generation] = part
            self._waiting.open(part, self._clock)

    def _refuse(self, connection: ev.Connection, opened: Open, code: str, detail: str) -> None:
        self._out.append(ev.Note(code, opened.reader, detail))
        self._out.append(ev.Send(connection, fail(opened.room, opened.generation, code, detail)))

    def _join(self, room: Room, part: Part) -> None:
        room.join(part, self._clock)
        self._packing.add(part)
        self._settle(room)

    def _failed(self, connection: ev.Connection, message: Fail) -> None:
        part = self._parts.get(message.generation)
        if part is not None:
            self._ended_by_reader(part)
        elif message.reader is not None:
            self._ended_unopened(connection, message, message.reader)

    def _ended_by_reader(self, part: Part) -> None:
        self._over(part)
        number, reader, generation = part.opened.room, part.reader, part.opened.generation
        if self._waiting.part(number, reader) is part:
            del self._parts[generation]
            absent = Absent(generation, part.opened.readers)
            self._waiting.end(number, reader, absent, part.connection, self._clock)

    def _ended_unopened(self, connection: ev.Connection, failed: Fail, reader: bytes) -> None:
        """Its OPEN was lost with its connection: how many readers there are is not known. Not noted
        where too many are: over that connection nothing is opened then."""
        number, absent = failed.room, Absent(failed.generation)
        room = self._current.get(number)
        in_room = room.generation(reader) if room is not None else -1
        before = self._waiting.generation(number, reader)
        if failed.generation <= max(in_room, before) or failed.generation in self._past:
            return  # doubled, or late
        if (part := self._waiting.part(number, reader)) is not None:
            self._ended_by_reader(part)  # its own FAIL was lost
        if room is not None and in_room < 0 and not room.settled:
            if len(room.absent) < MAX_WAITING:
                room.absent[reader] = absent
                self._settle(room)
        elif before >= 0 or not self._waiting.is_full(connection):
            self._waiting.end(number, reader, absent, connection, self._clock)

    def _connection_lost(self, event: ev.ConnectionLost) -> None:
        for part in [p for p in self._parts.values() if p.connection == event.connection]:
            self._ended_by_reader(part)

    # -- parts

    def _over(self, part: Part) -> None:
        """Nothing more is packed, or announced, for this reader."""
        if not part.ended:
            part.over = True
            self._packing.drop(part)
            if part.room is not None:
                self._settle(part.room)

    def _fail(self, part: Part, code: str, detail: str) -> None:
        opened = part.opened
        self._out.append(ev.Note(code, part.reader, detail))
        message = fail(opened.room, opened.generation, code, detail)
        self._out.append(ev.Send(part.connection, message))
        self._over(part)

    def _fail_parts(self, room: Room, code: str, detail: str) -> None:
        for part in room.parts.values():
            if not part.ended:
                self._fail(part, code, detail)

    def _settle(self, room: Room, given_up: bool = False) -> None:
        if not room.settled and (given_up or room.all_ended):
            room.settled = True
            self._out.append(ev.Settled(room.use))

    # -- packing

    def _packed(self, event: ev.Packed) -> None:
        for part in self._packing.end(event):
            self._fail(part, "pack", event.error)

    def _action_failed(self, event: ev.ActionFailed) -> None:
        match event.action:
            case ev.Pack(jobs):
                self._packed(ev.Packed(tuple(job.job for job in jobs), event.detail))
            case ev.Send(connection, message):
                for one in message.segments if isinstance(message, Ready) else ():
                    self.slots.acknowledge(one.slot, one.stamp)  # nobody knows of them
                self._connection_lost(ev.ConnectionLost(connection))

    # -- time

    def _tick(self, event: ev.Tick) -> None:
        for room in self._uses.values():
            if room.sent is None or room.settled:
                continue
            if self._clock - max(room.sent, room.progress) >= self._times.packing:
                self._give_up(room)
        for part in self._waiting.expire(self._clock - self._times.early_room):
            del self._parts[part.opened.generation]
            detail = f"room {part.opened.room}: no request came"
            self._out.append(ev.Note("early", part.reader, detail))
        for slot in self.slots.expire(self._clock):
            self._out.append(ev.Note("expired", b"", f"slot {slot} was never acknowledged"))

    def _give_up(self, room: Room) -> None:
        if room.missing > 0:
            detail = f"room {room.number}: {room.missing} readers have not opened it"
            self._out.append(ev.Note("unopened", b"", detail))
        self._fail_parts(room, "slow", "packing made no progress")
        self._settle(room, given_up=True)

    # -- books

    def left(self) -> dict[str, int]:
        """What is left of requests, by name; empty on an idle rank."""
        found = {
            "rooms": len(self._uses), "waiting": len(self._waiting), "jobs": len(self._packing),
            "offered": self.slots.offered, "parts": len(self._parts),
        }  # fmt: skip
        return {name: count for name, count in found.items() if count}


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.Begin: Machine._begin,
    ev.AddChunk: Machine._chunk,
    ev.ChunkWritten: Machine._chunk,
    ev.TargetSent: Machine._target_sent,
    ev.End: Machine._end,
    ev.Received: Machine._received,
    ev.ConnectionLost: Machine._connection_lost,
    ev.Packed: Machine._packed,
    ev.ActionFailed: Machine._action_failed,
    ev.Tick: Machine._tick,
}
