"""SGLang: whom a decode rank contacts for a request, what the real facts make of it, and the life
of a request, on a prefill group and on a decode group of ranks in lockstep."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode import events as dev
from sglang_mixkv.decode import plan as plans
from sglang_mixkv.draft.facts import Row, StagingFacts
from sglang_mixkv.draft.layout import SLOT_OVERHEAD, DraftFacts, DraftLayout
from sglang_mixkv.draft.targets import Target
from sglang_mixkv.tools.plan_pair import contacted
from tests.sim.decode import DecodeRank, Receiver
from tests.sim.prefill import PrefillRank, Sender
from tests.sim.spec import Server

if TYPE_CHECKING:
    from tests.sim.spec import Request, Where
    from tests.sim.world import World


@lru_cache(1 << 12)
def layout_of(heads: int, tp: int, rank: int) -> DraftLayout:
    return DraftLayout(DraftFacts("A", "EAGLE3", heads, (1, 1), "bf16"), tp, rank)


@lru_cache(1 << 12)
def slot_bytes(heads: int, tp: int, tokens: int) -> int:
    layout = layout_of(heads, tp, 0)
    return SLOT_OVERHEAD + tokens * layout.facts.bytes_per_token(len(layout.heads))


def contacts(world: World, request: Request, rank: DecodeRank) -> range:
    """Ranks of the prefill group."""
    theirs, ours = world.spec.servers[request.prefill[0]].tp, rank.place.server.tp
    return contacted(theirs, ours, rank.place.tp_rank)


def plan_for(
    world: World, request: Request, rank: DecodeRank, instances: tuple[bytes, ...]
) -> plans.Plan:
    """The real plan, with the instances that the rank knows."""
    prefill = world.spec.servers[request.prefill[0]]
    plan = make_plan(world.spec.heads, prefill, rank.place.server, rank.place.tp_rank)
    indices = contacts(world, request, rank)
    sources = tuple(
        replace(source, peer=instances[indices[i]]) for i, source in enumerate(plan.sources)
    )
    return plans.Plan(sources, plan.version)


@lru_cache(1 << 12)
def make_plan(heads: int, prefill: Server, decode: Server, rank: int) -> plans.Plan:
    rows = {("p", i): _row(heads, prefill, i) for i in range(prefill.tp)}
    infos = [{"rank_ip": "p", "rank_port": i} for i in contacted(prefill.tp, decode.tp, rank)]
    return plans.make_plan(infos, rows, _row(heads, decode, rank))


def _row(heads: int, server: Server, rank: int) -> Row:
    size = slot_bytes(heads, server.tp, server.tokens)
    return Row(
        PROTOCOL, "", "", b"%8d" % rank, "p", rank, "", server.tp, rank, 0, (),
        "mooncake", Target(0, 1, layer_ids=False, even=True),
        draft=layout_of(heads, server.tp, rank),
        staging=StagingFacts("mooncake", b"", 0, size, server.slots), patience=server.patience,
    )  # fmt: skip


WAITING = 90.0  # SGLang's own time-out for the target, on both sides; 300 s by default


class Group:
    """`epoch`: steps of a group that was killed do not go on in its successor."""

    def __init__(self, world: World, server: Server, number: int) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.clock.rng
        self.server, self.key = server, (server.number, number)
        first = number * server.tp
        self.places = [world.places[server.number, first + i] for i in range(server.tp)]
        self.epoch = 0

    @property
    def ranks(self) -> list:
        return [place.process for place in self.places]

    @property
    def is_alive(self) -> bool:
        return all(rank is not None and rank.alive for rank in self.ranks)

    def step(self, delay: float, call: Callable, *args: object) -> None:
        """Once all ranks of the group run: each of SGLang's steps begins with an all-reduce."""
        self.clock.after(delay, self._step, self.epoch, call, args)

    def _step(self, epoch: int, call: Callable, args: tuple) -> None:
        if epoch != self.epoch:
            return
        for rank in self.ranks:
            if rank.stopped:
                rank.park("scheduler", self._step, (epoch, call, args))
                return
        call(*args)

    def _skew(self) -> float:
        return self.rng.random() * 0.001


class PrefillGroup(Group):
    def __init__(self, world: World, server: Server, number: int) -> None:
        super().__init__(world, server, number)
        self.senders: dict[int, list[Sender]] = {}  # by request

    def arrive(self, request: Request) -> None:
        life = self.world.lives[request.id]
        if life.prefill_over:
            return
        life.prefill_begun = True
        self.senders[request.id] = [rank.begin(request) for rank in self.ranks]
        self.step(WAITING, self._waited, request)
        if request.optimistic or life.metadata == 0:
            self._chunk(request, 0, self.first_row(request))

    def first_row(self, request: Request) -> int:
        """Where the first chunk begins: with a whole page of this side's."""
        return min(request.first_token // self.server.page * self.server.page, request.prompt)

    def metadata(self, request: Request) -> None:
        """A decode rank's metadata is here."""
        life = self.world.lives[request.id]
        assert life.metadata
        life.metadata -= 1
        if life.metadata or not life.prefill_begun or life.prefill_over:
            return
        if request.optimistic:
            self._try_target(request)
        else:
            self._chunk(request, 0, self.first_row(request))

    def _chunk(self, request: Request, number: int, first: int) -> None:
        if self.world.lives[request.id].prefill_over:
            return
        chunk = request.chunks[number]
        last = number == len(request.chunks) - 1
        if chunk.pending:
            for rank, sender in self._of(request):
                rank.add_chunk(sender, first, chunk.count, last, True)
        self.step(chunk.seconds, self._chunk_done, request, number, first)

    def _of(self, request: Request) -> list[tuple[PrefillRank, Sender]]:
        return [(sender.rank, sender) for sender in self.senders[request.id]]

    def _chunk_done(self, request: Request, number: int, first: int) -> None:
        life = self.world.lives[request.id]
        if life.prefill_over:
            return
        chunk = request.chunks[number]
        last = number == len(request.chunks) - 1
        for rank, sender in self._of(request):
            rank.write(sender, first, chunk.count)
            if chunk.pending:
                rank.later("event", self.rng.random() * 0.0004, rank.written, sender)
            else:
                rank.add_chunk(sender, first, chunk.count, last, False)
        if last:
            life.written = True
            self._try_target(request)
        else:
            self._chunk(request, number + 1, first + chunk.count)

    # -- the target

    def _try_target(self, request: Request) -> None:
        life = self.world.lives[request.id]
        if not life.written or life.metadata != 0 or life.target_begun:
            return
        life.target_begun = True
        for index, (rank, sender) in enumerate(self._of(request)):
            delay = request.target * (1 + 0.2 * self.rng.random())
            rank.later(("target", request.id), delay, self._target, request, index, sender)

    def _target(self, request: Request, index: int, sender: Sender) -> None:
        if sender.ended:
            return
        if request.target_fails == index:
            self.fail(request, "the target's transfer failed")
            group = self.world.groups[request.decode]
            delay = self.rng.choice((0.01, 5)) * self.rng.random()
            self.clock.after(delay, group.fail, request, "the target's transfer failed")
            return
        sender.rank.target_sent(sender)
        self.world.groups[request.decode].target_part(request, index)
        self.poll(request)

    # -- ends

    def poll(self, request: Request) -> None:
        """SGLang acts on the least of the ranks' states."""
        polled = [sender.poll() for sender in self.senders[request.id]]
        if all(polled):
            self.step(self._skew(), self._finish, request)

    def _finish(self, request: Request) -> None:
        life = self.world.lives[request.id]
        if life.prefill_over:
            return
        life.prefill_over = True
        for rank, sender in self._of(request):
            rank.later("scheduler", self._skew(), rank.end, sender, "")

    def fail(self, request: Request, reason: str) -> None:
        self.step(0.0, self._fail, request, reason)

    def _fail(self, request: Request, reason: str) -> None:
        life = self.world.lives[request.id]
        if life.prefill_over:
            return
        life.prefill_over = True
        for rank, sender in self._of(request) if life.prefill_begun else ():
            rank.later("scheduler", self._skew(), rank.end, sender, reason)

    def _waited(self, request: Request) -> None:
        if not all(sender.sent for sender in self.senders[request.id]):
            self._fail(request, "time-out")

    def lost_reader(self, request: Request) -> None:
        """SGLang notices that decode is dead, where it still has to send there."""
        senders = self.senders.get(request.id, [])
        if not senders or not all(sender.sent for sender in senders):
            self.fail(request, "decode is dead")


class DecodeGroup(Group):
    def __init__(self, world: World, server: Server, number: int) -> None:
        super().__init__(world, server, number)
        self.receivers: dict[int, list[Receiver]] = {}  # by request
        self.tables: dict[DecodeRank, dict[Where, tuple[bytes, ...]]] = {}

    def arrive(self, request: Request) -> None:
        life = self.world.lives[request.id]
        if life.decode_over:
            return
        plans = [self._plan(request, rank) for rank in self.ranks]
        if None in plans:
            self._fail(request, "no prefill server", "stock")
        else:
            self._open(request, plans)

    def _plan(self, request: Request, rank: DecodeRank) -> plans.Plan | None:
        """None where a dead prefill gives no facts."""
        group = self.world.groups[request.prefill]
        table = self.tables.setdefault(rank, {})
        if request.prefill not in table:
            if not group.is_alive:
                return None
            table[request.prefill] = tuple(place.process.instance for place in group.places)
        return plan_for(self.world, request, rank, table[request.prefill])

    def _open(self, request: Request, plans: list) -> None:
        life, page = self.world.lives[request.id], self.server.page
        end = -(-request.prompt // page) * page
        receivers = self.receivers[request.id] = []
        messages = 0
        for rank, plan in zip(self.ranks, plans, strict=True):
            receiver = rank.open(request, plan, end)
            receivers.append(receiver)
            self.world.checks.opened(receiver, plan)
            receiver.targets = set(contacts(self.world, request, rank))
            messages += len(receiver.targets)
        life.metadata = messages
        self.step(WAITING, self._waited, request)
        group = self.world.groups[request.prefill]
        for _ in range(messages):
            group.step(0.0002 + self.rng.random() ** 2 * 0.003, group.metadata, request)

    # -- the target

    def target_part(self, request: Request, index: int) -> None:
        """One prefill rank's part of the target is there."""
        for receiver in self.receivers.get(request.id, ()):
            if index in receiver.targets:
                receiver.targets.discard(index)
                if not receiver.targets:
                    rank, delay = receiver.rank, self.rng.random() * 0.002
                    rank.later(("target", request.id), delay, rank.target_arrived, receiver)

    # -- ends

    def poll(self, request: Request) -> None:
        receivers = self.receivers[request.id]
        if any(receiver.verdict is dev.State.FAILED for receiver in receivers):
            self.step(self._skew(), self._fail, request, "rows could not be cleared", "drafter")
        elif all(receiver.done for receiver in receivers):
            self.step(self._skew(), self._commit, request)

    def _commit(self, request: Request) -> None:
        life = self.world.lives[request.id]
        if life.decode_over:
            return
        life.outcome, life.finished = "ok", self.clock.now
        for receiver in self.receivers[request.id]:
            rank = receiver.rank
            self.world.checks.rows(rank, receiver, receiver.verdict)
            rank.later("scheduler", self._skew(), rank.close, receiver, "")

    def fail(self, request: Request, reason: str, by: str = "stock") -> None:
        self.step(0.0, self._fail, request, reason, by)

    def _fail(self, request: Request, reason: str, by: str) -> None:
        life = self.world.lives[request.id]
        if life.decode_over:
            return
        life.outcome, life.reason, life.by = "failed", reason, by
        life.finished = self.clock.now
        for receiver in self.receivers.get(request.id, ()):
            receiver.rank.later("scheduler", self._skew(), receiver.rank.close, receiver, reason)
        told = request.abort is None or request.abort[2]
        if (told and self.rng.random() < 0.8) or by != "stock":
            group = self.world.groups[request.prefill]
            self.clock.after(self.rng.random() * 0.02, group.fail, request, "decode aborted it")

    def _waited(self, request: Request) -> None:
        receivers = self.receivers[request.id]
        if not all(receiver.arrived for receiver in receivers):
            self._fail(request, "time-out", "stock")

    def node_failure(self, request: Request) -> None:
        """SGLang's heartbeat has found the prefill server dead."""
        receivers = self.receivers.get(request.id, [])
        if not receivers or not all(receiver.arrived for receiver in receivers):
            self.fail(request, "prefill is dead")

    def forget(self, peer: bytes, rank: DecodeRank | None = None) -> None:
        for of, table in self.tables.items():
            for key in [k for k, instances in table.items() if peer in instances]:
                if rank in (None, of):
                    del table[key]
