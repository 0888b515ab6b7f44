"""A prefill rank: its machine, the threads that execute its actions, and SGLang's senders on it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sglang_mixkv.channel.messages import Ready
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.prefill import events as ev
from sglang_mixkv.prefill.rooms import Rooms
from tests.sim import memory
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import Place, World


class Sender:
    """SGLang's sender of one request on one rank. `cells`: the request's rows in the pool.

    `sent`: stock's own Success. `settled`: the machine's leave to report it.
    """

    def __init__(self, request: Request, use: int, rank: PrefillRank) -> None:
        self.request, self.use, self.rank = request, use, rank
        self.cells = [memory.EARLIER] * memory.TOKENS
        self.sent = self.settled = self.ended = False
        self.sent_at = self.slow_by = 0.0
        self.readers: set[int] = set()  # decode ranks whose metadata is here

    @property
    def done(self) -> bool:
        return self.sent and (self.settled or not self.rank.place.server.plugin)


class PrefillRank(Process):
    tick = ev.Tick()

    def __init__(self, world: World, place: Place, instance: bytes) -> None:
        super().__init__(world, f"P{place.server.number}.{place.rank}")
        self.place, self.instance = place, instance
        layout, self.facts = place.layout, place.layout.facts
        slots = SlotPool(place.server.slots, world.times)
        self.memory = memory.new_slots(slots.count)
        self.slot_bytes = place.slot_bytes
        self.machine = Rooms(
            instance, layout.heads, self._segment_tokens, slots, world.times, world.next_stamp
        )
        self.senders: dict[int, Sender] = {}  # by use
        self.awaiting: set[int] = set()  # uses that are sent, and not settled
        self._jobs: deque[ev.Pack] = deque()
        self._packing = False

    def _segment_tokens(self, heads: int, slot_bytes: int) -> int:
        return self.facts.tokens_in(min(slot_bytes, self.slot_bytes), heads)

    def is_urgent(self) -> bool:
        return bool(self.awaiting)

    def offers(self, slot: int, stamp: int) -> bool:
        """Whether the slot is a reader's, under this stamp."""
        return self.alive and self.machine.slots._offered.get(slot, (0, None))[1] == stamp

    # -- SGLang's side

    def begin(self, request: Request) -> Sender:
        sender = Sender(request, self.world.next_number(), self)
        self.senders[sender.use] = sender
        if self.place.server.plugin:
            self.post(ev.Begin(sender.use, request.number))
        return sender

    def add_chunk(self, sender: Sender, first: int, count: int, last: bool, pending: bool) -> None:
        if self.place.server.plugin and not sender.ended:
            self.post(ev.AddChunk(sender.use, first, count, last, (sender, first), pending))

    def write(self, sender: Sender, first: int, count: int) -> None:
        """The forward does, whatever the process's threads do."""
        if not sender.ended:
            for token in range(first, first + count):
                sender.cells[token] = memory.row(sender.request.id, token)

    def written(self, sender: Sender) -> None:
        if self.place.server.plugin and not sender.ended:
            self.post(ev.ChunkWritten(sender.use))

    def target_sent(self, sender: Sender) -> None:
        if sender.ended:
            return
        sender.sent, sender.sent_at = True, self.clock.now
        sender.slow_by = self.stopped_for
        if self.place.server.plugin:
            self.awaiting.add(sender.use)
            self.post(ev.TargetSent(sender.use))

    def end(self, sender: Sender, reason: str) -> None:
        """In the scheduler's thread. A request that failed is reported first; one that succeeded
        gives its pages back first. Others write to them at once."""
        if sender.ended:
            return
        sender.ended = True
        self.awaiting.discard(sender.use)
        self.later("scheduler", 0.0, self._give_back, sender, reason)

    def _give_back(self, sender: Sender, reason: str) -> None:
        ended, plugin = ev.End(sender.use, reason), self.place.server.plugin
        if plugin and reason:
            self.post(ended)
        sender.cells[:] = [memory.REUSED] * memory.TOKENS
        if plugin and not reason:
            self.later("scheduler", self.rng.random() * 0.001, self.post, ended)

    # -- actions

    def execute(self, action: ev.Action) -> None:
        match action:
            case ev.Send():
                self._send(action)
            case ev.Pack():
                self.world.checks.packs(self, action.pages[0])
                self._jobs.append(action)
                self._next_job()
            case ev.Settled():
                self._settled(action)
            case ev.Note():
                self.world.notes[action.what] += 1

    def _send(self, action: ev.Send) -> None:
        link = self.world.connections.get(action.connection)
        if isinstance(action.message, Ready):
            self.world.checks.ready_sent(self, link, action.message)
        if link is None:
            if self.rng.random() < 0.8:
                delay = self.rng.choice((0.0, 0.0, 5.0)) * self.rng.random()
                lost = ev.ConnectionLost(action.connection)
                self.later(action.connection, delay, self.handle, lost)
            return
        link.to_decode(action.message)

    def _settled(self, action: ev.Settled) -> None:
        sender = self.senders[action.use]
        self.world.checks.settled(self, sender)
        sender.settled = True
        self.awaiting.discard(action.use)
        self.world.groups[self.place.group].poll(sender.request)

    def _next_job(self) -> None:
        if self._jobs and not self._packing:
            self._packing = True
            self.later("packer", self.rng.random() * 0.0004, self._pack)

    def _pack(self) -> None:
        job = self._jobs.popleft()
        self.memory[job.slot][0] = job.stamp
        cut = self.rng.randint(0, job.count)
        self._copy(job, 0, cut)
        delay = self.rng.random() ** 4 * self.world.copying
        self.later("packer", delay, self._pack_rest, job, cut)

    def _pack_rest(self, job: ev.Pack, cut: int) -> None:
        self._copy(job, cut, job.count)
        slot = self.memory[job.slot]
        slot[job.count + 1] = job.stamp
        check = memory.checksum(slot[1 : job.count + 1]) if job.checksum else None
        error = ""
        if self.errors.get("pack"):
            self.errors["pack"] -= 1
            error = "the copy failed"
        self._packing = False
        self.post(ev.Packed(job.job, check, error))
        self._next_job()

    def _copy(self, job: ev.Pack, first: int, end: int) -> None:
        sender, token = job.pages
        slot, heads, cells = self.memory[job.slot], job.heads, sender.cells
        for i in range(first, end):
            slot[1 + i] = memory.packed(cells[token + job.offset + i], heads)
