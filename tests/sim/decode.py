"""A decode rank: its machine, the threads that execute its actions, and SGLang's receivers."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sglang_mixkv.channel.gate import Gate
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.rooms import Rooms
from tests.sim import memory
from tests.sim.network import Link
from tests.sim.plane import Read
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import Place, World

GOOD = (ev.State.WARM, ev.State.COLD)


class Receiver:
    """SGLang's receiver of one request on one rank. `cells`: by token, then by head of this rank.

    `owned`: the pages are the request's. `closed`: its gate is. `targets`: prefill ranks whose part
    of the target is still to come. `arrived`: stock's own Success.
    """

    def __init__(self, request: Request, rank: DecodeRank, generation: int, end: int) -> None:
        self.request, self.rank, self.generation = request, rank, generation
        drafts = rank.place.server.drafter != "none"
        self.heads, self.end = rank.place.layout.heads if drafts else range(0), end
        self.gate = Gate()
        row = [memory.EARLIER] * len(self.heads)
        shared = [memory.SHARED] * len(self.heads)
        first = request.first_token
        self.cells = [list(shared if token < first else row) for token in range(end)]
        self.owned, self.closed, self.arrived = True, False, False
        self.closing: str | None = None
        self.copying = False
        self.verdict: ev.State | None = None
        self.opened_at = rank.clock.now
        self.arrived_at = self.slow_by = 0.0
        self.targets: set[object] = set()
        self.plan_cold = ""

    @property
    def done(self) -> bool:
        return self.arrived and (self.verdict in GOOD or not self.rank.place.server.plugin)


class DecodeRank(Process):
    tick = ev.Tick()

    def __init__(self, world: World, place: Place, instance: bytes) -> None:
        super().__init__(world, f"D{place.server.number}.{place.rank}")
        self.place, self.instance = place, instance
        slots = SlotPool(place.server.slots, world.times)
        self.memory = memory.new_slots(slots.count)
        self.valid = [True] * slots.count  # by slot: what was read there was still offered
        self.machine = Rooms(instance, slots, place.slot_bytes, world.times)
        self.receivers: dict[int, Receiver] = {}  # by generation
        self.awaiting: set[int] = set()  # generations whose target is there, and no verdict
        self.reads: dict[int, Read] = {}
        self.links: dict[bytes, Link] = {}
        self.read_faults: list[tuple[str, bytes | None, int]] = []  # fate, of this peer, so many
        self._jobs: deque[ev.Unpack | ev.Clear] = deque()
        self._copying = False
        self._generation = 0

    def is_urgent(self) -> bool:
        return bool(self.awaiting or self.reads)

    def fate_of_read(self, peer: bytes) -> str:
        for number, (fate, of, count) in enumerate(self.read_faults):
            if of in (None, peer):
                self.read_faults[number] = fate, of, count - 1
                if count <= 1:
                    del self.read_faults[number]
                return fate
        return ""

    # -- SGLang's side

    def open(self, request: Request, plan: object, end: int, forward: float) -> Receiver:
        """SGLang's metadata is sent. `forward`: how long an earlier one still runs."""
        self._generation += 1
        generation = (self._generation << 32) + self.rng.getrandbits(32)
        receiver = Receiver(request, self, generation, end)
        self.receivers[generation] = receiver
        if forward:
            self.clock.after(forward, self._earlier_forward, receiver)
        if plan is not None:
            receiver.plan_cold = plan.cold
            self.post(
                ev.OpenRoom(
                    generation, request.number, plan.sources, request.first_token, end, plan.cold,
                    bool(forward), request.checksum,
                )
            )  # fmt: skip
        return receiver

    def _earlier_forward(self, receiver: Receiver) -> None:
        """It writes to pages of its former request; SGLang gives none of them back before."""
        for token in range(receiver.request.first_token, receiver.end):
            receiver.cells[token][:] = [memory.EARLIER] * len(receiver.heads)
        self.later("event", self.rng.random() * 0.0004, self._forward_done, receiver.generation)

    def _forward_done(self, generation: int) -> None:
        self.post(ev.ForwardDone(generation))

    def target_arrived(self, receiver: Receiver) -> None:
        if receiver.closed:
            return
        receiver.arrived, receiver.arrived_at = True, self.clock.now
        receiver.slow_by = self.stopped_for
        if self.place.server.plugin:
            if receiver.verdict is None:
                self.awaiting.add(receiver.generation)
            self.post(ev.TargetArrived(receiver.generation))
        self.world.groups[self.place.group].poll(receiver.request)

    def close(self, receiver: Receiver, reason: str) -> None:
        """Closing the gate waits for a copy that is under way; then pages may be given back."""
        if receiver.closed or receiver.closing is not None:
            return
        if receiver.copying:
            receiver.closing = reason
        else:
            self._close(receiver, reason)

    def _close(self, receiver: Receiver, reason: str) -> None:
        self.close_gate(receiver)
        receiver.closed, receiver.closing = True, None
        self.awaiting.discard(receiver.generation)
        if self.place.server.plugin:
            self.post(ev.CloseRoom(receiver.generation, reason))
        if reason:
            receiver.owned = False

    def close_gate(self, receiver: Receiver) -> None:
        receiver.gate.close()

    # -- actions

    def execute(self, action: ev.Action) -> None:
        match action:
            case ev.Send():
                self.world.checks.decode_sends(self, action)
                self.link(action.peer).to_prefill(action.message)
            case ev.StartRead():
                self._start_read(action)
            case ev.GiveUpRead():
                if action.read in self.reads:
                    self.reads[action.read].give_up()
            case ev.Unpack() | ev.Clear():
                self._jobs.append(action)
                self._next_job()
            case ev.Verdict():
                self._decided(action)
            case ev.Forget():
                self.world.groups[self.place.group].forget(action.peer, self)
            case ev.Note():
                self.world.notes[action.what] += 1

    def link(self, peer: bytes) -> Link:
        link = self.links.get(peer)
        if link is None:
            link = self.links[peer] = Link(self, peer, self.world.place_of[peer])
        return link

    def _start_read(self, action: ev.StartRead) -> None:
        remote = self.world.places_now.get(action.peer)
        segment = self.machine._reads._running.get(action.read)
        read = Read(self, action, remote, segment.ready.stamp if segment else 0)
        self.world.checks.read_begun(self, action.local_slot)
        self.reads[action.read] = read
        read.start()

    def read_ended(self, read: Read) -> None:
        del self.reads[read.number]
        self.valid[read.here] = read.valid

    def _decided(self, action: ev.Verdict) -> None:
        receiver = self.receivers[action.generation]
        self.world.checks.verdict(self, receiver, action)
        receiver.verdict = action.state
        self.awaiting.discard(action.generation)
        self.world.groups[self.place.group].poll(receiver.request)

    # -- the unpacking thread

    def _next_job(self) -> None:
        if self._jobs and not self._copying:
            self._copying = True
            self.later("unpacker", self.rng.random() * 0.0004, self._job)

    def _job(self) -> None:
        job = self._jobs.popleft()
        receiver = self.receivers[job.generation]
        receiver.copying = receiver.gate.enter()
        refused = self.refusal(job, receiver.copying)
        if refused is not None:
            self._leave(job, receiver, refused)
            return
        first, count = self.rows_of(job)
        cut = self.rng.randint(0, count)
        self._write(receiver, job, first, 0, cut)
        delay = self.rng.random() ** 4 * self.world.copying
        self.later("unpacker", delay, self._rest, job, receiver, first, cut, count)

    def refusal(self, job: ev.Unpack | ev.Clear, open_: bool) -> ev.Result | None:
        """Why nothing is written."""
        if not open_:
            return ev.Result.CLOSED
        kind = "clear" if isinstance(job, ev.Clear) else "unpack"
        if self.errors.get(kind):
            self.errors[kind] -= 1
            return ev.Result.ERROR
        if kind == "unpack":
            slot = self.memory[job.slot]
            if not memory.carries(slot, job.tokens, job.stamp, job.checksum):
                return ev.Result.STALE
        return None

    def rows_of(self, job: ev.Unpack | ev.Clear) -> tuple[int, int]:
        if isinstance(job, ev.Clear):
            return job.first_token, job.end - job.first_token
        return job.first_token, job.tokens

    def _rest(self, job: object, receiver: Receiver, first: int, cut: int, count: int) -> None:
        self._write(receiver, job, first, cut, count)
        if isinstance(job, ev.Unpack):
            self.world.checks.used(self, job)
        self._leave(job, receiver, ev.Result.DONE)

    def _leave(self, job: object, receiver: Receiver, result: ev.Result) -> None:
        if receiver.copying:
            receiver.copying = False
            receiver.gate.leave()
        if receiver.closing is not None:
            self._close(receiver, receiver.closing)
        self._copying = False
        self.post(ev.JobDone(job.job, result, "injected" if result is ev.Result.ERROR else ""))
        self._next_job()

    def _write(
        self, receiver: Receiver, job: ev.Unpack | ev.Clear, first: int, start: int, end: int
    ) -> None:
        if start < end:
            self.world.checks.pool_written(self, receiver, first + start, first + end)
        cells = receiver.cells
        if isinstance(job, ev.Clear):
            for token in range(first + start, first + end):
                cells[token][:] = [memory.EMPTY] * len(receiver.heads)
            return
        slot, heads = self.memory[job.slot], job.heads
        left = heads.start - receiver.heads.start
        for i in range(start, end):
            value = memory.unpacked(slot[1 + i], heads)
            cells[first + i][left : left + len(heads)] = [value] * len(heads)
