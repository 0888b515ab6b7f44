r"""A decode rank's state machine: calls in, actions out, time as an argument. No I/O.

    OPENED --all rows in place--> WARM
       \--a fault, or too late-----> cold --the other rows zeroed--> COLD
                                          \--zeroing fails---------> FAILED

Each announced segment of a request is read into a slot of this rank, acknowledged, and copied to
the pool. A fault on this rank or a peer, or draft KV later than `Times` allows, makes the request
cold. A request fails only if its rows cannot be zeroed.

After a long stall of the thread, open requests go cold: announced slots may have been reused in the
meantime (docs/protocol.md, "When a slot is used again").
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_mixkv.channel.actions import Note, Send, StartCopies
from sglang_mixkv.channel.messages import Fail, Open, Ready
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.breaker import Breaker
from sglang_mixkv.decode.cold import FAILS, ColdReason
from sglang_mixkv.decode.segments import Job, Segments
from sglang_mixkv.decode.transfer import Generation, Opened, Peer, RecentRooms, Request
from sglang_mixkv.draft.copier import Outcome
from sglang_mixkv.draft.slot_format import SlotCheck

TICKS = 0.5  # seconds; a running thread ticks more often, and no stall limit is shorter


class Machine:
    """All requests of one decode rank. `slot_bytes`: the size of its own slots."""

    def __init__(self, instance: bytes, slots: SlotPool, slot_bytes: int, times: Times) -> None:
        self._instance, self._slot_bytes, self._times = instance, slot_bytes, times
        self.breaker, self.slots = Breaker(), slots
        self._recent = RecentRooms(times.early_room)
        self._segments = Segments(slots)
        self._requests: dict[Generation, Request] = {}
        self._out: list[act.Action] = []
        self._clock, self._restored = float("-inf"), False

    def advance(self, now: float) -> None:
        """Set the clock before each call below. A long stall makes requests cold."""
        stalled, self._clock = now - self._clock, now
        if stalled > TICKS:
            for request in list(self._requests.values()):
                if request.wants and stalled > request.limits.stall:
                    detail = f"this rank was stalled for {stalled:.1f} s"
                    self._go_cold(request, ColdReason.STALLED, detail)

    def actions(self) -> list[act.Action]:
        """Return the actions since the last call, in the order in which to carry them out."""
        actions, self._out = self._out, []
        return actions + self._segments.actions(self._clock)

    # -- SGLang's side

    def open(self, opened: Opened) -> None:
        """Open a request whose metadata SGLang has sent. One Verdict follows, unless closed."""
        wanted = [source.peer for source in opened.sources if source.heads]
        cold = opened.cold or (ColdReason.RESTORED if wanted and self._restored else "")
        if self._recent.is_ambiguous(opened.bootstrap_room, self._clock) and wanted:
            cold = cold or ColdReason.REPEATED
        if wanted and not cold and self.breaker.blocked(wanted, opened.generation, self._clock):
            cold = ColdReason.BREAKER
        request = Request(opened, not cold, self._times, self._clock)
        self._requests[opened.generation] = request
        for source in opened.sources:
            message = request.message(source, self._instance, self._slot_bytes)
            self._out.append(Send(source.peer, message))
        if cold:
            self._go_cold(request, cold, "")
        elif not request.missing():
            self._decide(request, act.State.WARM)

    def target_arrived(self, generation: Generation) -> None:
        """Record that SGLang's own transfer has succeeded, which starts the clock for draft KV."""
        request = self._requests.get(generation)
        if request is not None and request.arrived is None:
            request.arrived = self._clock

    def close(self, generation: Generation, reason: str = "") -> None:
        """End a request; its gate is closed. `reason`: why it failed."""
        request = self._requests.pop(generation, None)
        if request is None:
            return
        self.breaker.release_probe(generation)
        for source in request.opened.sources:
            transfer = request.transfers.get(source.peer)
            if reason or (transfer is not None and not transfer.last and not request.cold):
                self._out.append(Send(source.peer, request.failure("closed", reason)))
        request.decided = True
        self._segments.drop(request)

    # -- peers

    def ready(self, peer: Peer, ready: Ready) -> None:
        """Handle a peer's READY: segments, or the end of its part of a request."""
        request = self._requests.get(ready.generation)
        transfer = request.transfers.get(peer) if request is not None else None
        if request is None or transfer is None or not request.wants:
            # segments in flight are acknowledged when their reads end
            self._segments.acknowledge(peer, self._segments.not_read(peer, ready.segments))
            return
        if ready.segment < transfer.announced:
            self._out.append(Note("doubled", peer, f"segment {ready.segment}"))
            return  # the ACK for the first READY covers both
        if violation := transfer.violation(ready, request.opened):
            self._segments.acknowledge(peer, ready.segments)
            self._go_cold(request, ColdReason.PROTOCOL, violation, peer)
            return
        request.progress = self._clock
        request.first_ready = self._clock if request.first_ready is None else request.first_ready
        for segment in transfer.accept(ready, request, self._clock):
            self._segments.add(segment)
        self.slots.sign(peer, self._clock)
        if not ready.segments:
            self._finish(request)

    def failed(self, peer: Peer, message: Fail) -> None:
        """Handle a peer's FAIL: the peer sends nothing more for a request."""
        request = self._requests.get(message.generation)
        if message.code == "restarted":
            self._out.append(act.Forget(peer))
        transfer = request.transfers.get(peer) if request is not None else None
        if request is not None and transfer is not None and not transfer.last and request.wants:
            transfer.last = True  # so that no FAIL is sent back
            reason = FAILS.get(message.code, ColdReason.PREFILL_OTHER)
            reason = ColdReason.UNSENT if message.code == ColdReason.UNSENT else reason
            self._go_cold(request, reason, message.detail, peer)

    def peer_lost(self, peer: Peer, gone: bool = False) -> None:
        """Handle a message that could not be sent. `gone`: the peer was dropped, so nothing more is
        read from it, and it gets no strike."""
        for request in list(self._requests.values()):
            one = request.transfers.get(peer)
            if one is None or not request.wants or (one.complete if gone else one.last):
                continue
            why = "its server was given up" if gone else "a message could not be sent"
            self._go_cold(request, ColdReason.LOST, why, peer, strikes=[peer] * (not gone))
        if gone:
            self.breaker.forget(peer)

    def restored(self) -> None:
        """Make all requests cold from now on, since no connection of the data plane works."""
        self._restored = True
        for request in self._requests.values():
            if request.wants:
                self._go_cold(request, ColdReason.RESTORED, "")

    # -- segments

    def read_ended(self, read: act.StartRead, error: str = "") -> None:
        """Handle the end of a read: no more bytes land. `error`: "" if all bytes have landed."""
        self._segments.end_read(read, self._clock, error)
        if error or self._clock > read.until:
            self._read_failed(read, error or "it took too long")
        request = read.segments[0].request
        if read.failed or not request.wants:
            for segment in read.segments:
                self._segments.remove(segment)
            return
        request.progress = self._clock
        self._segments.copy(request, read.segments)

    def _read_failed(self, read: act.StartRead, detail: str) -> None:
        read.failed = True
        request = read.segments[0].request
        if request.wants:
            self._go_cold(request, ColdReason.READ, detail, read.peer, strikes=[read.peer])

    def copied(self, jobs: Sequence[Job], outcome: Outcome) -> None:
        requests: dict[Request, None] = {}
        self._segments.copying.difference_update(jobs)
        is_placed = outcome is SlotCheck.OK
        for job in jobs:
            job.request.copying -= 1
            if isinstance(job, act.Clear):
                self._cleared(job.request, outcome)
                continue
            self._segments.remove(job)
            requests[job.request] = None
            if is_placed:
                if not job.transfer.placed:
                    self.breaker.came(job.peer)
                job.transfer.place(job)
            elif outcome is not None and job.request.wants:
                is_stale = outcome in (SlotCheck.STALE, SlotCheck.DIFFERS)
                reason = ColdReason.STALE if is_stale else ColdReason.UNPACK
                self._go_cold(job.request, reason, repr(outcome)[:300], job.peer)
        for request in requests:
            if is_placed:
                request.progress = self._clock
                self._finish(request)
            if request.cold:
                self._clear(request)

    def _finish(self, request: Request) -> None:
        if request.wants and not request.missing():
            for peer, transfer in request.transfers.items():
                if transfer.announced:  # without segments, no read has succeeded
                    self.breaker.forget(peer)
            self._decide(request, act.State.WARM)

    # -- cold

    def _go_cold(
        self, request: Request, why: ColdReason, detail: str, *peers: Peer,
        strikes: Sequence[Peer] = (),
    ) -> None:  # fmt: skip
        """Make a request cold. The log names `peers`; the failure counts against `strikes`."""
        request.cold = why
        for peer in peers or (b"",):
            self._out.append(Note(why, peer, detail))
        for peer in strikes:
            if self.breaker.record_failure(peer, request.generation, self._clock):
                self._out.append(Note("breaker_opened", peer, detail))
        self.breaker.release_probe(request.generation)
        for transfer in request.transfers.values():
            if not transfer.last:
                self._out.append(Send(transfer.source.peer, request.failure(why, detail)))
        self._segments.drop(request)
        self._clear(request)

    def _clear(self, request: Request) -> None:
        """Zero the missing rows of a cold request, once nothing else writes to them."""
        if request.copying or request.decided:
            return
        if (first := request.placed_to) >= request.opened.end:
            self._decide(request, act.State.COLD)
        else:
            self._segments.copy(request, [act.Clear(request, first, request.opened.end)])

    def _cleared(self, request: Request, outcome: Outcome) -> None:
        if request.decided or outcome is None:
            return
        if outcome is SlotCheck.OK:
            self._decide(request, act.State.COLD)
        else:
            self._out.append(Note("not_cleared", b"", detail := repr(outcome)[:300]))
            self._decide(request, act.State.FAILED, detail)

    def _decide(self, request: Request, state: act.State, detail: str = "") -> None:
        request.decided = True
        if state is act.State.WARM:
            self._recent.was_warm(request.opened.bootstrap_room)
        self._out.append(act.Verdict(request.opened.handle, state, detail or request.cold))

    # -- time

    def tick(self) -> None:
        """Handle all deadlines. Call it every 0.1 s if requests are open, else every second."""
        since = self._clock - self._times.shortest_wait
        self._segments.note_delays(self._clock, since)  # before cold requests drop their segments
        for read in self._segments.overdue(self._clock):
            self._read_failed(read, "it took too long")
        for request in list(self._requests.values()):
            waiting = request.waiting()
            # prefill reuses a slot after `slot_aside`, even if it was not read
            if waiting and self._clock - waiting[0].since >= request.limits.unread:
                self._go_cold(request, ColdReason.SLOTS, "no slot was free", waiting[0].peer)
            elif request.wants and self._clock >= request.deadline(self._times):
                late = self._segments.late(request, since)
                self._go_cold(
                    request, ColdReason.DEADLINE, "its KV is late", *request.missing(), strikes=late
                )

    def on_action_failed(self, action: act.Action, error: Exception) -> None:
        """Handle a failed action. A lost ACK's slots expire; a FAIL's request has ended already."""
        match action:
            case Send(peer, Open(_, room, generation)):
                self.failed(peer, Fail(room, generation, ColdReason.UNSENT, repr(error)[:300]))
            case act.StartRead():
                self.read_ended(action, repr(error)[:300])
            case StartCopies(jobs):
                self.copied(jobs, error)
