r"""A decode rank's state machine: calls in, actions out, time as an argument. No I/O.

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

from collections.abc import Sequence

from sglang_mixkv.channel.messages import Fail, Open, Ready
from sglang_mixkv.channel.slot_format import SlotCheck
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.breaker import Breaker
from sglang_mixkv.decode.segments import Job, Segments
from sglang_mixkv.decode.transfer import Generation, Numbers, Opened, Peer, Room, Stage
from sglang_mixkv.draft.copier import Outcome
from sglang_mixkv.series import FAILS, ColdReason

TICKS = 0.5  # seconds within which a thread that runs has ticked; no room's stall is shorter


class Machine:
    """All rooms of one decode rank. `slot_bytes`: of each of its own slots."""

    def __init__(self, instance: bytes, slots: SlotPool, slot_bytes: int, times: Times) -> None:
        self._instance, self._slot_bytes, self._times = instance, slot_bytes, times
        self.breaker, self.slots = Breaker(), slots
        self._numbers = Numbers(times.early_room)
        self._segments = Segments(slots)
        self._rooms: dict[Generation, Room] = {}
        self._out: list[act.Action] = []
        self._clock = float("-inf")

    def advance(self, now: float) -> None:
        """Set the clock before each call below. After a long stall of this rank rooms go cold."""
        stood_still, self._clock = now - self._clock, now
        if stood_still > TICKS:
            for room in list(self._rooms.values()):
                if room.wants and stood_still > room.limits.stall:
                    detail = f"this rank stood still for {stood_still:.1f} s"
                    self._go_cold(room, ColdReason.STALLED, detail)

    def actions(self) -> list[act.Action]:
        """Return the actions since the last time, in the order in which they must be done."""
        actions, self._out = self._out, []
        return actions + self._segments.actions(self._clock)

    # -- SGLang's side

    def open(self, opened: Opened) -> None:
        """SGLang has sent a request's metadata. One Verdict follows, unless `close` comes before.
        `forward_done` follows where the room is `pending`."""
        wanted = [source.peer for source in opened.sources if source.heads]
        cold = opened.cold
        if self._numbers.is_doubtful(opened.bootstrap_room, self._clock) and wanted:
            cold = cold or ColdReason.REPEATED
        if wanted and not cold and self.breaker.blocked(wanted, opened.generation, self._clock):
            cold = ColdReason.BREAKER
        room = Room(opened, not cold, self._times, self._clock)
        self._rooms[opened.generation] = room
        for source in opened.sources:
            message = room.message(source, self._instance, self._slot_bytes)
            self._out.append(act.Send(source.peer, message))
        if cold:
            self._go_cold(room, cold, "")
        elif room.complete:
            self._decide(room, act.State.WARM)

    def forward_done(self, generation: Generation, error: str = "") -> None:
        """The earlier forward is over; with an `error` nobody knows, and another call follows."""
        room = self._rooms.get(generation)
        if room is None:
            return
        if error:
            if room.wants:
                self._go_cold(room, ColdReason.UNPACK, error)
            return
        room.pending = False
        for segment in room.of_stage(Stage.HELD):
            self._segments.copy(segment)
        if room.cold:
            self._clear(room)

    def target_arrived(self, generation: Generation) -> None:
        """SGLang's own transfer of the room has succeeded: from now on draft KV may be late."""
        room = self._rooms.get(generation)
        if room is not None and room.arrived is None:
            room.arrived = self._clock

    def close(self, generation: Generation, reason: str = "") -> None:
        """SGLang is done with the room, and its gate is closed. `reason`: why it failed."""
        room = self._rooms.pop(generation, None)
        if room is None:
            return
        self.breaker.release_probe(generation)
        for source in room.opened.sources:
            part = room.parts.get(source.peer)
            if reason or (part is not None and not part.last and not room.cold):
                self._out.append(act.Send(source.peer, room.failure("closed", reason)))
        room.closed = True
        self._segments.drop(room)

    # -- peers

    def ready(self, peer: Peer, ready: Ready) -> None:
        """The peer announces segments, or its end of a room."""
        room = self._rooms.get(ready.generation)
        part = room.parts.get(peer) if room is not None else None
        if room is None or part is None or not room.wants:
            # a segment that is being read is acknowledged when its read ends
            self._segments.acknowledge(peer, self._segments.not_read(peer, ready.segments))
            return
        if ready.segment < part.announced:
            self._out.append(act.Note("doubled", peer, f"segment {ready.segment}"))
            return  # the first copy's ACK is this one's
        if violation := part.violation(ready, room.opened):
            self._segments.acknowledge(peer, ready.segments)
            self._go_cold(room, ColdReason.PROTOCOL, violation, peer)
            return
        room.progress = self._clock
        room.first_ready = self._clock if room.first_ready is None else room.first_ready
        for segment in part.accept(ready, room, self._clock):
            self._segments.add(segment)
        self.slots.sign(peer, self._clock)
        if not ready.segments:
            self._finish(room)

    def failed(self, peer: Peer, message: Fail) -> None:
        """The peer sends no more of a room."""
        room = self._rooms.get(message.generation)
        if message.code == "restarted":
            self._out.append(act.Forget(peer))
        part = room.parts.get(peer) if room is not None else None
        if room is not None and part is not None and not part.last and room.wants:
            part.last = True  # and is not answered
            reason = FAILS.get(message.code, ColdReason.PREFILL_OTHER)
            reason = ColdReason.UNSENT if message.code == ColdReason.UNSENT else reason
            self._go_cold(room, reason, message.detail, peer)

    def peer_lost(self, peer: Peer, gone: bool = False) -> None:
        """A message could not be sent. `gone`: the peer is dropped: not read, and not struck."""
        for room in list(self._rooms.values()):
            part = room.parts.get(peer)
            if part is None or not room.wants or (part.complete if gone else part.last):
                continue
            why = "its server was given up" if gone else "a message could not be sent"
            self._go_cold(room, ColdReason.LOST, why, peer, strikes=[peer] * (not gone))
        if gone:
            self.breaker.forget(peer)

    # -- segments

    def read_ended(self, read: act.StartRead, error: str = "") -> None:
        """Nothing of it lands in local slots any more. All is there, unless there is an `error`."""
        self._segments.end_read(read, self._clock, error)
        if error or self._clock > read.until:
            self._read_failed(read, error or "it took too long")
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

    def _read_failed(self, read: act.StartRead, detail: str) -> None:
        read.failed = True
        room = read.segments[0].room
        if room.wants:
            self._go_cold(room, ColdReason.READ, detail, read.peer, strikes=[read.peer])

    def copied(self, jobs: Sequence[Job], outcome: Outcome) -> None:
        """These jobs of StartCopies actions have all ended so."""
        rooms: dict[Room, None] = {}
        self._segments.end_jobs(jobs)
        for job in jobs:
            if isinstance(job, act.Clear):
                self._cleared(job.room, outcome)
                continue
            rooms[job.room] = None
            if outcome is SlotCheck.OK:
                job.part.place(job)
                if len(job.part.placed) == 1:
                    self.breaker.came(job.peer)
            elif outcome is not None and job.room.wants:
                is_stale = outcome in (SlotCheck.STALE, SlotCheck.DIFFERS)
                reason = ColdReason.STALE if is_stale else ColdReason.UNPACK
                self._go_cold(job.room, reason, repr(outcome)[:300], job.peer)
        for room in rooms:
            if outcome is SlotCheck.OK:
                room.progress = self._clock
                self._finish(room)
            if room.cold:
                self._clear(room)

    def _finish(self, room: Room) -> None:
        if room.wants and room.complete:
            for peer, part in room.parts.items():
                if part.announced:  # one without says nothing of reads
                    self.breaker.forget(peer)
            self._decide(room, act.State.WARM)

    # -- cold

    def _go_cold(
        self, room: Room, why: ColdReason, detail: str, *peers: Peer, strikes: Sequence[Peer] = ()
    ) -> None:
        """`peers`: named in the log; `strikes`: those that it counts against."""
        room.cold = why
        for peer in peers or (b"",):
            self._out.append(act.Note(why, peer, detail))
        for peer in strikes:
            if self.breaker.record_failure(peer, room.generation, self._clock):
                self._out.append(act.Note("breaker_opened", peer, detail))
        self.breaker.release_probe(room.generation)
        for part in room.parts.values():
            if not part.last:
                self._out.append(act.Send(part.source.peer, room.failure(why, detail)))
        self._segments.drop(room)
        self._clear(room)

    def _clear(self, room: Room) -> None:
        """Zero a cold room's rows that are not in place, once nothing else writes to them."""
        if room.pending or room.copying or room.decided or room.closed:
            return
        if (first := room.placed_to) >= room.opened.end:
            self._decide(room, act.State.COLD)
        else:
            self._segments.copy(act.Clear(room, first, room.opened.end))

    def _cleared(self, room: Room, outcome: Outcome) -> None:
        if room.closed or outcome is None:
            return
        if outcome is SlotCheck.OK:
            self._decide(room, act.State.COLD)
        else:
            self._out.append(act.Note("not_cleared", b"", detail := repr(outcome)[:300]))
            self._decide(room, act.State.FAILED, detail)

    def _decide(self, room: Room, state: act.State, detail: str = "") -> None:
        room.decided = True
        if state is act.State.WARM:
            self._numbers.was_warm(room.opened.bootstrap_room)
        self._out.append(act.Verdict(room.opened.handle, state, detail or room.cold))

    # -- time

    def tick(self) -> None:
        """Time has passed. Needed at least every 0.1 s while a room is open, and every second."""
        for read in self._segments.overdue(self._clock):
            self._read_failed(read, "it took too long")
        for room in list(self._rooms.values()):
            waiting = room.of_stage(Stage.WAITING)
            # prefill uses a slot again after `slot_aside`, whether it was read or not
            if waiting and self._clock - waiting[0].since >= room.limits.unread:
                self._go_cold(room, ColdReason.SLOTS, "no slot was free", waiting[0].peer)
            elif room.wants and self._clock >= room.deadline(self._times):
                late = self._segments.late(room, self._clock - self._times.shortest_wait)
                self._go_cold(
                    room, ColdReason.DEADLINE, "its KV is late", *room.missing(), strikes=late
                )

    # -- actions that raised, and what is outstanding

    def on_action_failed(self, action: act.Action, error: Exception) -> None:
        """This action raised. A message concerns its generation alone; slots of an ACK expire."""
        match action:
            case act.Send(peer, Open(generation=generation) | Fail(generation=generation)):
                self.failed(peer, Fail(0, generation, ColdReason.UNSENT, repr(error)[:300]))
            case act.StartRead():
                self.read_ended(action, repr(error)[:300])
            case act.StartCopies(jobs):
                self.copied(jobs, error)

    def state(self, generation: Generation) -> Room | None:
        """The room, to be read and not changed; None once it is closed."""
        return self._rooms.get(generation)

    def outstanding(self) -> dict[str, int]:
        """Count by name what requests still hold; empty on an idle rank."""
        found = {"rooms": len(self._rooms), **self._segments.outstanding()}
        return {name: count for name, count in found.items() if count}
