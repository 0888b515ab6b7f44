"""A prefill rank: its machine, the threads that execute its actions, and SGLang's senders on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mixkv.channel.messages import Fail, Ready
from sglang_mixkv.prefill import events as ev
from sglang_mixkv.prefill.machine import Machine
from sglang_mixkv.prefill.worker import SendHandle
from tests.sim import memory
from tests.sim.process import Gated, Process

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import Place, World


class Sender(Gated):
    """SGLang's sender of one request on one rank. `cells`: the request's rows in the pool.

    `succeeded`: SGLang's Success was reported. `given_back`: the pages may be another's. `over`:
    the machine knows that the request has ended, or lost its number to another.
    """

    def __init__(self, request: Request, number: int, rank: PrefillRank) -> None:
        self.handle = SendHandle(request.number)
        super().__init__(self.handle.gate)
        self.request, self.number, self.rank = request, number, rank
        self.cells = [memory.EARLIER] * memory.TOKENS
        self.succeeded = self.ended = self.given_back = self.over = False

    @property
    def settled(self) -> bool:
        return self.handle.settled

    def poll(self) -> bool:
        """Whether Success is reported, as in the plugin's sender."""
        if self.has_target and not self.succeeded:
            self.succeeded = self.handle.settled and self.gate.shut()
        return self.succeeded


class PrefillRank(Process):
    tick, undone = ev.Tick(), staticmethod(ev.undone)

    def __init__(self, world: World, place: Place, instance: bytes) -> None:
        super().__init__(world, place, instance)
        self.machine = Machine(
            instance, place.layout.heads, self._segment_tokens, self.slots, place.times,
            world.next_number,
        )  # fmt: skip
        self.senders: dict[int, Sender] = {}  # by use
        self.packed: dict[int, Sender] = {}  # whose rows, by stamp

    def _segment_tokens(self, heads: int, slot_bytes: int) -> int:
        return self.place.layout.facts.tokens_in(min(slot_bytes, self.place.slot_bytes), heads)

    def offers(self, slot: int, stamp: int) -> bool:
        """Whether the slot is a reader's, under this stamp."""
        return self.alive and self.slots._offered.get(slot, (0, None))[1] == stamp

    # -- SGLang's side

    def begin(self, request: Request) -> Sender:
        sender = Sender(request, self.world.next_number(), self)
        self.senders[sender.number] = sender
        self.post(ev.Begin(sender.number, request.number))
        return sender

    def add_chunk(self, sender: Sender, first: int, count: int, last: bool, pending: bool) -> None:
        self.post(ev.AddChunk(sender.number, first, count, last, (sender, first), pending))

    def write(self, sender: Sender, first: int, count: int) -> None:
        """The forward does, whatever the process's threads do."""
        for token in range(first, first + count):
            sender.cells[token] = memory.row(sender.request.id, token)

    def written(self, sender: Sender) -> None:
        if not sender.ended:
            self.post(ev.ChunkWritten(sender.number))

    def target_sent(self, sender: Sender) -> None:
        sender.note_target(self)
        self.awaiting.add(sender.number)
        self.post(ev.TargetSent(sender.number))

    def end(self, sender: Sender, reason: str) -> None:
        """In the scheduler's thread. A request that failed is ended first, `Outbox.end`; one that
        succeeded gives its pages back first."""
        sender.ended = True
        self.awaiting.discard(sender.number)
        delay = self.rng.random() * (0.0005 if reason else 0.001)
        if reason:
            self.copiers.close(sender, self.later, ("scheduler", delay, self._end, sender, reason))
            return
        self._give_back(sender)
        self.later("scheduler", delay, self.copiers.close, sender, self._end, (sender, reason))

    def _end(self, sender: Sender, reason: str) -> None:
        self.post(ev.End(sender.number, reason))
        self._give_back(sender)

    def _give_back(self, sender: Sender) -> None:
        """Others write to the pages at once."""
        sender.given_back = True
        sender.cells[:] = [memory.REUSED] * memory.TOKENS

    # -- actions

    def execute(self, action: ev.Action) -> None:
        match action:
            case ev.Send():
                self._send(action)
            case ev.Pack(jobs):
                for job in jobs:
                    self.packed[job.stamp] = job.pages[0]
                    self.world.checks.packs(self, job.pages[0])
                    self.copiers.put(job)
            case ev.Settled(use):
                sender = self.senders[use]
                self.world.checks.settled(self, sender)
                sender.handle.settled = True
                self.awaiting.discard(use)
                self.group.poll(sender.request)

    def _send(self, action: ev.Send) -> None:
        link = self.world.connections.get(action.connection)
        match action.message:
            case Ready():
                self.world.checks.ready_sent(self, link, action.message)
            case Fail():
                self.world.checks.part_over(self, action.message.generation)
        if link is not None:
            link.to_decode(action.message)
        elif self.rng.random() < 0.8:
            delay = self.rng.choice((0.0, 0.0, 5.0)) * self.rng.random()
            lost = ev.ConnectionLost(action.connection)
            self.later(action.connection, delay, self.handle, lost)

    # -- the packing threads

    def owner_of(self, job: ev.PackJob) -> Sender:
        return job.pages[0]

    def refusal(self, job: ev.PackJob, open_: bool) -> ev.Packed | None:
        return None if open_ else ev.Packed((job.job,), closed=True)

    def count(self, job: ev.PackJob) -> int:
        return job.count

    def copy(self, sender: Sender, job: ev.PackJob, first: int, end: int) -> None:
        if first < end:
            self.world.checks.pool_read(self, sender)
        token = job.pages[1] + job.offset
        slot, heads, cells = self.memory[job.slot], job.heads, sender.cells
        for i in range(first, end):
            slot[1 + i] = memory.packed(cells[token + i], heads)

    def end_copy(self, sender: Sender, job: ev.PackJob) -> ev.Packed:
        slot = self.memory[job.slot]
        slot[0] = job.stamp
        slot[job.count + 1] = memory.checksum(slot[1 : job.count + 1], job.stamp)
        error = ""
        if self.errors.get("pack"):
            self.errors["pack"] -= 1
            error = "the copy failed"
        return ev.Packed((job.job,), error)

    def left_gate(self, sender: Sender) -> None:
        """SGLang's next poll finds it idle."""
        if sender.settled and sender.has_target and not sender.ended:
            self.group.poll(sender.request)
