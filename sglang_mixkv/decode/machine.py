r"""A decode rank's state machine: events in, actions out, time as an argument. No I/O.

    OPENED --all rows in place--> WARM
       \--something is in the way--> cold --the other rows zeroed--> COLD
                                          \--they cannot be--------> FAILED

A room reads each announced segment into a slot of this rank, acknowledges it, and copies it to the
pool through the room's gate. Its own trouble, a peer's, or draft KV that is later than `Times`
allows makes it cold: rows that are not in place are zeroed, and the request goes on with a cold
drafter. The drafter ends a request only if even that fails.

A thread that stood still no longer trusts what it was sent before: a slot may have been used
again meanwhile (docs/protocol.md, "When a slot is used again").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_mixkv.channel.messages import Fail, Ready, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.breaker import Breaker, Numbers
from sglang_mixkv.decode.segments import PendingRead, Segments
from sglang_mixkv.decode.transfer import Room, Stage

PREFILL_CODES = ("aborted", "pack", "slow", "heads", "full", "restarted")
TICKS = 0.5  # seconds within which a thread that runs has ticked; no room's stall is shorter


class Machine:
    """All rooms of one decode rank. `slot_bytes`: of each of its own slots."""

    def __init__(self, instance: bytes, slots: SlotPool, slot_bytes: int, times: Times) -> None:
        self._instance, self._slot_bytes, self._times = instance, slot_bytes, times
        self.breaker, self.slots = Breaker(), slots
        self._numbers = Numbers(times.early_room)
        self._segments = Segments(slots)
        self._rooms: dict[ev.Generation, Room] = {}
        self._out: list[ev.Action] = []
        self._clock = float("-inf")

    def handle(self, event: ev.Event, now: float) -> None:
        stood_still, self._clock = now - self._clock, now
        if stood_still > TICKS:
            for room in list(self._rooms.values()):
                if room.wants and stood_still > room.limits.stall:
                    detail = f"this rank stood still for {stood_still:.1f} s"
                    self._go_cold(room, "stalled", detail)
        _HANDLERS[type(event)](self, event)

    def actions(self) -> list[ev.Action]:
        """In the order in which they must be done."""
        actions, self._out = self._out, []
        return actions + self._segments.actions(self._clock)

    # -- SGLang's side

    def _open(self, event: ev.OpenRoom) -> None:
        wanted = [source.peer for source in event.sources if source.heads]
        cold = event.cold
        if self._numbers.is_doubtful(event.bootstrap_room, self._clock) and wanted:
            cold = cold or "repeated"
        if wanted and not cold and self.breaker.blocked(wanted, event.generation, self._clock):
            cold = "breaker"
        room = Room(event, not cold, self._times, self._clock)
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
        for segment in room.of_stage(Stage.HELD):
            self._segments.copy(segment)
        if room.cold:
            self._clear(room)

    def _target_arrived(self, event: ev.TargetArrived) -> None:
        room = self._rooms.get(event.generation)
        if room is not None and room.arrived is None:
            room.arrived = self._clock

    def _close(self, event: ev.CloseRoom) -> None:
        room = self._rooms.pop(event.generation, None)
        if room is None:
            return
        self.breaker.release_probe(event.generation)
        for source in room.opened.sources:
            part = room.parts.get(source.peer)
            if event.reason or (part is not None and not part.last and not room.cold):
                self._fail(room, source, "closed", event.reason)
        room.closed = True
        self._segments.drop(room)

    # -- peers

    def _received(self, event: ev.Received) -> None:
        message = event.message
        room = self._rooms.get(message.generation)
        if isinstance(message, Ready):
            self._ready(event.peer, room, message)
        else:
            self._failed(event.peer, room, message)

    def _ready(self, peer: ev.Peer, room: Room | None, ready: Ready) -> None:
        part = room.parts.get(peer) if room is not None else None
        if room is None or part is None or not room.wants:
            # a segment that is being read is acknowledged when its read ends
            self._segments.acknowledge(peer, self._segments.not_read(peer, ready.segments))
            return
        if ready.segment < part.announced:
            self._out.append(ev.Note("doubled", peer, f"segment {ready.segment}"))
            return  # the first copy's ACK is this one's
        if violation := part.violation(ready, room.opened):
            self._segments.acknowledge(peer, ready.segments)
            self._go_cold(room, "protocol", violation, peer)
            return
        room.progress = self._clock
        room.first_ready = self._clock if room.first_ready is None else room.first_ready
        self.slots.sign(peer, self._clock)
        for segment in part.accept(ready, room, self._clock):
            self._segments.add(segment)
        if not ready.segments:
            self._finish(room)

    def _failed(self, peer: ev.Peer, room: Room | None, message: Fail) -> None:
        if message.code == "restarted":
            self._out.append(ev.Forget(peer))
        part = room.parts.get(peer) if room is not None else None
        if room is not None and part is not None and not part.last and room.wants:
            part.last = True  # and is not answered
            code = "prefill_" + (message.code if message.code in PREFILL_CODES else "other")
            code = "unsent" if message.code == "unsent" else code  # not by prefill
            self._go_cold(room, code, message.detail, peer)

    def _peer_lost(self, event: ev.PeerLost) -> None:
        """A peer that is gone is not read from any more either, and gets no strike."""
        for room in list(self._rooms.values()):
            part = room.parts.get(event.peer)
            if part is None or not room.wants or (part.complete if event.gone else part.last):
                continue
            why = "its server was given up" if event.gone else "a message could not be sent"
            self._go_cold(room, "lost", why, event.peer, strikes=[event.peer] * (not event.gone))
        if event.gone:
            self.breaker.forget(event.peer)

    # -- segments

    def _read_ended(self, event: ev.ReadEnded) -> None:
        read = self._segments.end_read(event.read, self._clock, event.error)
        if event.error or self._clock > read.until:
            self._read_failed(read, event.error or "it took too long")
        for segment in read.segments:
            room = segment.room
            if read.failed or not room.wants:
                self._segments.remove(segment)
                continue
            room.progress = self._clock
            if room.pending:
                segment.stage = Stage.HELD
            else:
                self._segments.copy(segment)

    def _read_failed(self, read: PendingRead, detail: str) -> None:
        read.failed = True
        room = read.segments[0].room
        if room.wants:
            self._go_cold(room, "read", detail, read.peer, strikes=[read.peer])

    def _copied(self, event: ev.Copied) -> None:
        rooms: dict[Room, None] = {}
        for room, segment in self._segments.end_jobs(event.jobs):
            if segment is None:
                self._cleared(room, event)
                continue
            rooms[room] = None
            if event.result is ev.Result.DONE:
                segment.part.place(segment)
                if len(segment.part.placed) == 1:
                    self.breaker.came(segment.peer)
            elif event.result is not ev.Result.CLOSED and room.wants:
                reason = "stale" if event.result is ev.Result.STALE else "unpack"
                self._go_cold(room, reason, event.detail, segment.peer)
        for room in rooms:
            if event.result is ev.Result.DONE:
                room.progress = self._clock
                self._finish(room)
            if room.cold:
                self._clear(room)

    def _finish(self, room: Room) -> None:
        if room.wants and room.complete:
            for peer, part in room.parts.items():
                if part.announced:  # one without says nothing of reads
                    self.breaker.forget(peer)
            self._decide(room, ev.State.WARM)

    # -- cold

    def _go_cold(
        self, room: Room, reason: str, detail: str, *peers: ev.Peer, strikes: Sequence[ev.Peer] = ()
    ) -> None:
        """`peers`: named in the log; `strikes`: those that it counts against."""
        room.cold = reason
        for peer in peers or (b"",):
            self._out.append(ev.Note("cold_" + reason, peer, detail))
        for peer in strikes:
            if self.breaker.record_failure(peer, room.generation, self._clock):
                self._out.append(ev.Note("breaker_opened", peer, detail))
        self.breaker.release_probe(room.generation)
        for part in room.parts.values():
            if not part.last:
                self._fail(room, part.source, reason, detail)
        self._segments.drop(room)
        self._clear(room)

    def _clear(self, room: Room) -> None:
        """Clear the rows of a cold room, once nothing else writes to them."""
        if room.pending or room.copying or room.decided or room.closed:
            return
        if room.placed_to >= room.opened.end:
            self._decide(room, ev.State.COLD)
        else:
            self._segments.clear(room)

    def _cleared(self, room: Room, event: ev.Copied) -> None:
        if room.closed or event.result is ev.Result.CLOSED:
            return
        if event.result is ev.Result.DONE:
            self._decide(room, ev.State.COLD)
        else:
            self._out.append(ev.Note("not_cleared", b"", event.detail))
            self._decide(room, ev.State.FAILED, event.detail)

    def _decide(self, room: Room, state: ev.State, detail: str = "") -> None:
        room.decided = True
        if state is ev.State.WARM:
            self._numbers.was_warm(room.opened.bootstrap_room)
        self._out.append(ev.Verdict(room.opened.handle, state, detail or room.cold))

    # -- time

    def _tick(self, event: ev.Tick) -> None:
        for read in self._segments.overdue(self._clock):
            self._read_failed(read, "it took too long")
        for room in list(self._rooms.values()):
            waiting = room.of_stage(Stage.WAITING)
            # prefill uses a slot again after `slot_aside`, whether it was read or not
            if waiting and self._clock - waiting[0].since >= room.limits.unread:
                self._go_cold(room, "slots", "no slot was free to read it", waiting[0].peer)
            elif room.wants and self._clock >= room.deadline(self._times):
                late = self._segments.late(room, self._clock - self._times.shortest_wait)
                self._go_cold(room, "deadline", "its KV is late", *room.missing(), strikes=late)

    # -- output and books

    def _fail(self, room: Room, source: ev.Source, code: str, detail: str) -> None:
        message = fail(room.opened.bootstrap_room, room.generation, code, detail)
        self._out.append(ev.Send(source.peer, message))

    def left(self) -> dict[str, int]:
        """What is left of requests, by name; empty on an idle rank."""
        found = {"rooms": len(self._rooms), **self._segments.left()}
        return {name: count for name, count in found.items() if count}


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.OpenRoom: Machine._open,
    ev.ForwardDone: Machine._forward_done,
    ev.TargetArrived: Machine._target_arrived,
    ev.CloseRoom: Machine._close,
    ev.Received: Machine._received,
    ev.PeerLost: Machine._peer_lost,
    ev.ReadEnded: Machine._read_ended,
    ev.Copied: Machine._copied,
    ev.Tick: Machine._tick,
}
