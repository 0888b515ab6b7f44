r"""A decode rank's state machine: events in, actions out, time as an argument. No I/O.

    OPENED --all rows in place--> WARM
       \--something is in the way--> cold --the other rows zeroed--> COLD
                                          \--they cannot be--------> FAILED

A room reads each announced segment into a slot of this rank, acknowledges it, and copies it to the
pool through the room's gate. Its own trouble, a peer's, or a wait that is longer than the target's
transfer deserves makes it cold: rows that are not in place are zeroed, and the request goes on
with a cold drafter. The drafter ends a request only if even that fails.

A thread that stood still no longer trusts what it was sent before: a slot may have been used
again meanwhile (docs/protocol.md, "When a slot is used again").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sglang_mixkv.channel.messages import NO_SLOT, Ack, Fail, Ready, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.breaker import Breaker
from sglang_mixkv.decode.copies import Copies
from sglang_mixkv.decode.parts import Room
from sglang_mixkv.decode.reads import Reads, Segment

PREFILL_CODES = ("aborted", "pack", "slow", "heads", "full", "restarted")


class Rooms:
    """All rooms of one decode rank. `slot_bytes`: of each of its own slots."""

    def __init__(self, instance: bytes, slots: SlotPool, slot_bytes: int, times: Times) -> None:
        self._instance, self._slot_bytes, self._times = instance, slot_bytes, times
        self.breaker = Breaker()
        self._reads = Reads(slots)
        self._rooms: dict[ev.Generation, Room] = {}
        self._copies = Copies()
        self._out: list[ev.Action] = []
        self._now: float | None = None

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Actions, in the order in which they must be done."""
        last, self._now = self._now, now
        if last is not None and now - last > self._times.stall:
            self._distrust(now - last)
        _HANDLERS[type(event)](self, event)
        self._out.extend(self._reads.start(now))
        actions, self._out = self._out, []
        return actions

    @property
    def _clock(self) -> float:
        assert self._now is not None
        return self._now

    def _distrust(self, seconds: float) -> None:
        for room in list(self._rooms.values()):
            if room.wants:
                self._go_cold(room, "stalled", f"this rank stood still for {seconds:.1f} s")

    # -- SGLang's side

    def _open(self, event: ev.OpenRoom) -> None:
        wanted = [source.peer for source in event.sources if source.heads]
        cold = event.cold
        if wanted and not cold and self.breaker.blocked(wanted, event.generation, self._clock):
            cold = "breaker"
        room = Room(event, not cold, self._clock)
        self._rooms[event.generation] = room
        for source in event.sources:
            message = room.message(source, self._instance, self._slot_bytes)
            self._out.append(ev.Send(source.peer, message))
        if cold:
            self._go_cold(room, cold, "")
        elif room.complete:
            self._decide(room, ev.State.WARM)

    def _forward_done(self, event: ev.ForwardDone) -> None:
        room = self._rooms.get(event.generation)
        if room is None:
            return
        room.pending = False
        self._out.extend(map(self._copies.unpack, self._copies.take_held(room)))
        self._clear(room)

    def _target_arrived(self, event: ev.TargetArrived) -> None:
        room = self._rooms.get(event.generation)
        if room is not None and room.arrived is None:
            room.arrived = self._clock

    def _close(self, event: ev.CloseRoom) -> None:
        room = self._rooms.pop(event.generation, None)
        if room is None:
            return
        if not room.decided:
            self._note("closed", event.reason)
            self.breaker.withdraw(event.generation)
        for source in room.opened.sources:
            part = room.parts.get(source.peer)
            if event.reason or (part is not None and not part.last and not room.cold):
                self._fail(room, source.peer, "closed", event.reason)
        room.closed = True
        self._drop(room)

    # -- peers

    def _received(self, event: ev.Received) -> None:
        match event.message:
            case Ready():
                self._ready(event.peer, event.message)
            case Fail():
                self._failed(event.peer, event.message)

    def _ready(self, peer: ev.Peer, ready: Ready) -> None:
        room = self._rooms.get(ready.generation)
        part = room.parts.get(peer) if room is not None else None
        if room is not None:
            room.known.add(peer)
        if room is None or part is None or not room.wants:
            if not self._reads.is_reading(peer, ready):  # doubled: its end is acknowledged
                self._acknowledge(peer, ready)
            return
        if ready.segment < part.segments:
            self._note("doubled", f"segment {ready.segment}", peer)
            return  # the first copy's ACK is this one's
        if violation := part.violation(ready, room.opened.end):
            self._acknowledge(peer, ready)
            self._go_cold(room, "protocol", violation, [peer])
            return
        part.accept(ready)
        room.progress = self._clock
        room.first_ready = self._clock if room.first_ready is None else room.first_ready
        if ready.count:
            self._reads.add(Segment(room, part, ready, self._clock))
        self._finish(room)

    def _failed(self, peer: ev.Peer, message: Fail) -> None:
        if message.code == "restarted":
            self._out.append(ev.Forget(peer))
        room = self._rooms.get(message.generation)
        part = room.parts.get(peer) if room is not None else None
        if room is not None:
            room.known.add(peer)
        if room is not None and part is not None and not part.last and room.wants:
            code = message.code if message.code in PREFILL_CODES else "other"
            self._go_cold(room, f"prefill_{code}", message.detail, [peer])

    def _peer_lost(self, event: ev.PeerLost) -> None:
        """One that is gone is not read from any more either, and nothing is held against it."""
        for room in list(self._rooms.values()):
            part = room.parts.get(event.peer)
            if part is None or not room.wants or (part.complete if event.gone else part.last):
                continue
            why = "its server was given up" if event.gone else "a message could not be sent"
            self._go_cold(room, "lost", why, [event.peer], strike=not event.gone)
        if event.gone:
            self.breaker.forget(event.peer)

    # -- reads

    def _read_done(self, event: ev.ReadDone) -> None:
        segment = self._reads.end(event.read)
        self._acknowledge(segment.peer, segment.ready)
        if self._clock - segment.started > self._times.read:
            self._read_went_wrong(segment, "it took too long")
        room = segment.room
        if segment.failed or not room.wants:
            self._reads.slots.free(segment.slot)
            return
        room.progress = self._clock
        if room.pending:
            self._copies.hold(segment)
        else:
            self._out.append(self._copies.unpack(segment))

    def _read_failed(self, event: ev.ReadFailed) -> None:
        self._read_went_wrong(self._reads.get(event.read), event.detail)

    def _read_settled(self, event: ev.ReadSettled) -> None:
        segment = self._reads.end(event.read)
        self._acknowledge(segment.peer, segment.ready)
        self._reads.slots.free(segment.slot)

    def _read_went_wrong(self, segment: Segment, detail: str) -> None:
        segment.failed = True
        if segment.room.wants:
            self._go_cold(segment.room, "read", detail, [segment.peer], strike=True)

    # -- copies

    def _job_done(self, event: ev.JobDone) -> None:
        room, segment = self._copies.end(event)
        if segment is None:
            self._cleared(room, event)
            return
        self._reads.slots.free(segment.slot)
        if event.result is ev.Result.DONE:
            ready = segment.ready
            segment.part.placed[ready.segment] = ready.first_token + ready.count
            room.progress = self._clock
            self._finish(room)
        elif event.result is not ev.Result.CLOSED and room.wants:
            reason = "stale" if event.result is ev.Result.STALE else "unpack"
            self._go_cold(room, reason, event.detail, [segment.peer])
        self._clear(room)

    def _finish(self, room: Room) -> None:
        if room.wants and room.complete:
            for peer, part in room.parts.items():
                if part.has_rows:  # one without says nothing of reads
                    self.breaker.warm(peer)
            self.breaker.withdraw(room.generation)
            self._decide(room, ev.State.WARM)

    # -- cold

    def _go_cold(
        self,
        room: Room,
        reason: str,
        detail: str,
        peers: list[ev.Peer] | None = None,
        strike: bool = False,
    ) -> None:
        """`peers`: who is to be named; `strike`: and counted against."""
        room.cold = reason
        for peer in peers or [b""]:
            self._note("cold_" + reason, detail, peer)
        for peer in (peers or ()) if strike else ():
            if self.breaker.strike(peer, room.generation, self._clock):
                self._note("breaker_opened", detail, peer)
        self.breaker.withdraw(room.generation)
        for peer, part in room.parts.items():
            if not part.last:
                self._fail(room, peer, reason, detail)
        self._drop(room)
        self._clear(room)

    def _drop(self, room: Room) -> None:
        """Segments of a room that wants them no more."""
        for segment in self._reads.drop_waiting(room):
            self._acknowledge(segment.peer, segment.ready)
        for segment in self._copies.take_held(room):
            self._reads.slots.free(segment.slot)

    def _clear(self, room: Room) -> None:
        """Once nothing else writes to the rows of a cold room."""
        if not room.cold or room.pending or room.unpacking:
            return
        if room.decided or room.closed or room.clearing:
            return
        if room.placed_to >= room.opened.end:
            self._decide(room, ev.State.COLD)
        else:
            self._out.append(self._copies.clear(room))

    def _cleared(self, room: Room, event: ev.JobDone) -> None:
        if room.closed:
            return
        if event.result is ev.Result.DONE:
            self._decide(room, ev.State.COLD)
        elif event.result is not ev.Result.CLOSED:
            self._note("not_cleared", event.detail)
            self._decide(room, ev.State.FAILED, event.detail)

    def _decide(self, room: Room, state: ev.State, detail: str = "") -> None:
        room.decided = True
        self._out.append(ev.Verdict(room.generation, state, detail or room.cold))

    # -- time

    def _tick(self, event: ev.Tick) -> None:
        for segment in self._reads.overdue(self._clock - self._times.read):
            self._out.append(ev.GiveUpRead(segment.read))
            self._read_went_wrong(segment, "it took too long")
        # prefill uses a slot again after `slot_aside`, whether it was read or not
        for segment in self._reads.unread(self._clock - self._times.unread):
            self._go_cold(segment.room, "slots", "no slot was free to read it", [segment.peer])
        for room in list(self._rooms.values()):
            if room.wants and self._clock >= room.deadline(self._times):
                self._go_cold(room, "deadline", "its KV did not come", room.missing(), strike=True)

    # -- output and books

    def _acknowledge(self, peer: ev.Peer, ready: Ready) -> None:
        if ready.slot != NO_SLOT:
            self._out.append(ev.Send(peer, Ack(ready.slot, ready.stamp)))

    def _fail(self, room: Room, peer: ev.Peer, code: str, detail: str) -> None:
        reader = None if peer in room.known else self._instance
        message = fail(room.opened.bootstrap_room, room.generation, code, detail, reader)
        self._out.append(ev.Send(peer, message))

    def _note(self, what: str, detail: str, peer: ev.Peer = b"") -> None:
        self._out.append(ev.Note(what, peer, detail))

    def left(self) -> dict[str, int]:
        """How much of what a rank at rest has none of."""
        found = {
            "rooms": len(self._rooms), "reads": len(self._reads), "jobs": len(self._copies),
            "held": self._copies.held,
        }  # fmt: skip
        return {name: count for name, count in found.items() if count}

    def check(self) -> Iterator[str]:
        """What is wrong with the books, at any time."""
        yield from self._reads.slots.check()
        used = self._reads.running + self._copies.unpacking + self._copies.held
        slots = self._reads.slots
        if slots.free_slots + used != slots.count:
            yield f"slots: {slots.free_slots} free, {used} in use of {slots.count}"
        for generation in self._copies.orphans():
            if generation not in self._rooms:
                yield f"segments are held for room {generation}, which is closed"


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.OpenRoom: Rooms._open,
    ev.ForwardDone: Rooms._forward_done,
    ev.TargetArrived: Rooms._target_arrived,
    ev.CloseRoom: Rooms._close,
    ev.Received: Rooms._received,
    ev.PeerLost: Rooms._peer_lost,
    ev.ReadDone: Rooms._read_done,
    ev.ReadFailed: Rooms._read_failed,
    ev.ReadSettled: Rooms._read_settled,
    ev.JobDone: Rooms._job_done,
    ev.Tick: Rooms._tick,
}
