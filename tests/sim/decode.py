"""A decode rank: its machine, the threads that execute its actions, and SGLang's receivers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mixkv.channel.gate import Gate
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.machine import Machine
from tests.sim import memory
from tests.sim.network import Link, Read
from tests.sim.process import Gated, Process

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import Place, World

GOOD = (ev.State.WARM, ev.State.COLD)


class Receiver(Gated):
    """SGLang's receiver of one request on one rank. `cells`: by token, then by head of this rank.

    `closed`: its gate is. `targets`: prefill ranks whose part of the target is still to come.
    `progress`: when rows were last known to be in place.
    """

    def __init__(self, request: Request, rank: DecodeRank, generation: int, end: int) -> None:
        super().__init__(Gate())
        self.request, self.rank, self.generation = request, rank, generation
        self.heads, self.end = rank.place.layout.heads, end
        row = [memory.EARLIER] * len(self.heads)
        shared = [memory.SHARED] * len(self.heads)
        first = request.first_token
        self.cells = [list(shared if token < first else row) for token in range(end)]
        self.closing = self.closed = False
        self.verdict: ev.State | None = None
        self.progress = 0.0
        self.targets: set[int] = set()

    @property
    def done(self) -> bool:
        return self.has_target and self.verdict in GOOD


class DecodeRank(Process):
    tick, undone = ev.Tick(), staticmethod(ev.undone)

    def __init__(self, world: World, place: Place, instance: bytes) -> None:
        super().__init__(world, place, instance)
        self.valid = [True] * self.slots.count  # by slot: what was read there was still offered
        self.machine = Machine(instance, self.slots, place.slot_bytes, place.times)
        self.receivers: dict[int, Receiver] = {}  # by generation
        self.reads: dict[int, Read] = {}
        self.links: dict[bytes, Link] = {}
        self.read_faults: list[list] = []  # fate, of this peer, so many
        self.job_of: dict[int, Receiver] = {}
        self.known: dict[int, list[bytes]] = {}  # instances of a prefill server's ranks
        self.stuck = 0.0  # seconds that reads of the fate "stuck" hold their slots

    def is_urgent(self) -> bool:
        return bool(self.reads) or super().is_urgent()

    def fate_of_read(self, peer: bytes) -> str:
        for entry in self.read_faults:
            if entry[2] and entry[1] in (None, peer):
                entry[2] -= 1
                return entry[0]
        return ""

    # -- SGLang's side

    def open(self, request: Request, sources: tuple[ev.Source, ...], end: int) -> Receiver:
        """SGLang's metadata is sent."""
        generation = self.world.next_number()
        receiver = Receiver(request, self, generation, end)
        self.receivers[generation] = receiver
        if request.forward:
            self.clock.after(request.forward, self._earlier_forward, receiver)
        self.post(
            ev.OpenRoom(
                generation, request.number, sources, request.first_token, end,
                pending=bool(request.forward), handle=generation, page_size=self.place.server.page,
            )
        )  # fmt: skip
        return receiver

    def _earlier_forward(self, receiver: Receiver) -> None:
        """It writes to pages of its former request; SGLang gives none of them back before."""
        for token in range(receiver.request.first_token, receiver.end):
            receiver.cells[token][:] = [memory.EARLIER] * len(receiver.heads)
        done = ev.ForwardDone(receiver.generation)
        self.later("event", self.rng.random() * 0.0004, self.post, done)

    def target_arrived(self, receiver: Receiver) -> None:
        if receiver.closed:
            return
        receiver.note_target(self)
        if receiver.verdict is None:
            self.awaiting.add(receiver.generation)
        self.post(ev.TargetArrived(receiver.generation))
        self.group.poll(receiver.request)

    def close(self, receiver: Receiver, reason: str) -> None:
        if not receiver.closing:
            receiver.closing = True
            self.copiers.close(receiver, self._close, (receiver, reason))

    def _close(self, receiver: Receiver, reason: str) -> None:
        receiver.closed = True
        self.awaiting.discard(receiver.generation)
        self.post(ev.CloseRoom(receiver.generation, reason))

    # -- actions

    def execute(self, action: ev.Action) -> None:
        match action:
            case ev.Send():
                self.world.checks.decode_sends(self, action.peer, action.message)
                self.link(action.peer).to_prefill(action.message)
            case ev.StartRead():
                self._start_read(action)
            case ev.Copy(jobs):
                for job in jobs:
                    self.job_of[job.job] = self.receivers[job.handle]
                    self.copiers.put(job)
            case ev.Verdict(handle, state):
                receiver = self.receivers[handle]
                self.world.checks.verdict(self, receiver, action)
                receiver.verdict = state
                self.awaiting.discard(handle)
                self.group.poll(receiver.request)
            case ev.Forget():
                self.known = {k: v for k, v in self.known.items() if action.peer not in v}

    def link(self, peer: bytes) -> Link:
        link = self.links.get(peer)
        if link is None:
            link = self.links[peer] = Link(self, peer, self.world.place_of[peer])
        return link

    def _start_read(self, action: ev.StartRead) -> None:
        begun = self.machine._segments._reads.get(action.read)
        segments = begun.segments if begun is not None else ()
        read = Read(self, action, [one.announced.stamp for one in segments])
        for one in action.ranges:
            self.world.checks.read_begun(self, one.local_slot)
        self.reads[action.read] = read
        read.start()

    def read_ended(self, read: Read) -> None:
        del self.reads[read.number]
        for number, one in enumerate(read.ranges):
            self.valid[one.local_slot] = read.valid[number]

    # -- the unpacking threads

    def owner_of(self, job: ev.Job) -> Receiver:
        return self.receivers[job.handle]

    def refusal(self, job: ev.Job, open_: bool) -> ev.Copied | None:
        """Why nothing is written."""
        kind = "clear" if isinstance(job, ev.Clear) else "unpack"
        if not open_:
            return ev.Copied((job.job,), ev.Result.CLOSED)
        if self.errors.get(kind):
            self.errors[kind] -= 1
            return ev.Copied((job.job,), ev.Result.ERROR, "injected")
        if kind == "unpack":
            slot = self.memory[job.slot]
            if not memory.carries(slot, job.tokens, job.stamp):
                return ev.Copied((job.job,), ev.Result.STALE)
        return None

    def count(self, job: ev.Job) -> int:
        return job.tokens if isinstance(job, ev.Unpack) else job.end - job.first_token

    def begin_copy(self, receiver: Receiver, job: ev.Job) -> None:
        self.world.checks.copy_begun(self, receiver, job)

    def copy(self, receiver: Receiver, job: ev.Job, first: int, end: int) -> None:
        start, cells = job.first_token, receiver.cells
        if first < end:
            self.world.checks.pool_written(self, receiver, start + first, start + end)
        if isinstance(job, ev.Clear):
            for token in range(start + first, start + end):
                cells[token][:] = [memory.EMPTY] * len(receiver.heads)
            return
        slot, heads = self.memory[job.slot], job.heads
        left = heads.start - receiver.heads.start
        for i in range(first, end):
            value = memory.unpacked(slot[1 + i], heads)
            cells[start + i][left : left + len(heads)] = [value] * len(heads)

    def end_copy(self, receiver: Receiver, job: ev.Job) -> ev.Copied:
        if isinstance(job, ev.Unpack):
            self.world.checks.used(self, job)
        return ev.Copied((job.job,), ev.Result.DONE)
