"""What must hold, whatever goes wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sglang_mixkv.channel.messages import NO_SLOT, Ack, Open, Ready
from sglang_mixkv.decode import events as dev
from sglang_mixkv.prefill import events as pev
from tests.sim import faults, memory
from tests.sim.decode import DecodeRank

if TYPE_CHECKING:
    from tests.sim.decode import Receiver
    from tests.sim.network import Link
    from tests.sim.prefill import PrefillRank, Sender
    from tests.sim.process import Process
    from tests.sim.world import World

STRIKES = ("deadline", "read", "lost")
SLACK = 0.5  # ticks and copies, on top of a deadline


class Finding(Exception):
    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant, self.detail = invariant, detail


class Checks:
    def __init__(self, world: World, every: int) -> None:
        self.world, self._every, self._turn = world, every, 0
        self._ready: Counter[tuple[DecodeRank, int]] = Counter()  # READYs handled, by stamp
        self._acked: Counter[tuple[DecodeRank, int]] = Counter()
        self._progress: dict[tuple[PrefillRank, int], float] = {}  # of a room number
        self._strikes: dict[tuple[DecodeRank, bytes], list[float]] = {}
        self._warmed: dict[tuple[DecodeRank, bytes], float] = {}
        self._probed: dict[tuple[DecodeRank, bytes], float] = {}  # when that room was opened

    # -- books

    def books(self, process: Process) -> None:
        self._turn += 1
        if self._turn % self._every == 0:
            for wrong in process.machine.check():
                raise Finding("books", f"{process.name}: {wrong}")

    def event(self, process: Process, event: object) -> None:
        if type(event) is dev.Received and type(event.message) is Ready:
            if event.message.slot != NO_SLOT:
                self._ready[process, event.message.stamp] += 1
        elif type(event) is pev.Received and type(event.message) is Open:
            self._progress[process, event.message.room] = self._running(process)

    def decode_sends(self, rank: DecodeRank, action: dev.Send) -> None:
        if not isinstance(action.message, Ack):
            return
        key = rank, action.message.stamp
        self._acked[key] += 1
        if self._acked[key] > self._ready[key]:
            raise Finding("acks", f"{rank.name} acknowledges a READY twice")
        if any(read.stamp == key[1] for read in rank.reads.values()):
            raise Finding("acks", f"{rank.name} acknowledges a slot that it still reads")

    def ready_sent(self, rank: PrefillRank, link: Link | None, ready: Ready) -> None:
        """`link`: None where the reader has gone, and this rank does not know it yet."""
        self._progress[rank, ready.room] = self._running(rank)
        if link is not None and link.peer != rank.instance:
            raise Finding("instance", f"{rank.name} serves a reader of its former instance")
        slots = rank.machine.slots
        most = max(slots._held.values(), default=0)
        if most > max(2, slots.count // 4):
            raise Finding("quota", f"{rank.name}: one reader holds {most} of {slots.count} slots")

    # -- the pool

    def pool_written(self, rank: DecodeRank, receiver: Receiver, first: int, end: int) -> None:
        if receiver.closed or not receiver.owned:
            raise Finding("gate", f"{rank.name}: rows are written after the room was closed")
        if first < receiver.request.first_token or end > receiver.end:
            raise Finding("prefix", f"{rank.name}: rows {first}..{end} are not the room's")

    def read_begun(self, rank: DecodeRank, slot: int) -> None:
        if any(read.here == slot for read in rank.reads.values()):
            raise Finding("landing", f"{rank.name}: two reads may land in slot {slot}")

    def packs(self, rank: PrefillRank, sender: Sender) -> None:
        if sender.settled:
            raise Finding("settled", f"{rank.name} packs rows of a request that may be over")

    def used(self, rank: DecodeRank, job: dev.Unpack) -> None:
        if not rank.valid[job.slot]:
            raise Finding("lease", f"{rank.name} used bytes of a slot that was another's by then")

    def verdict(self, rank: DecodeRank, receiver: Receiver, verdict: dev.Verdict) -> None:
        if receiver.verdict is not None:
            raise Finding("verdict", f"{rank.name}: two verdicts")
        receiver.reason = verdict.reason
        self.rows(rank, receiver, verdict.state)
        self._breaker(rank, receiver, verdict)
        if receiver.arrived:
            took = self._running(rank) - receiver.arrived_at + receiver.slow_by
            if took > self.world.times.whole_wait + SLACK:
                raise Finding("late verdict", f"{rank.name}: {took:.2f} s after the target")

    def rows(self, rank: DecodeRank, receiver: Receiver, state: dev.State) -> None:
        if state is dev.State.FAILED:
            return
        request = receiver.request
        for token in range(request.first_token, request.prompt):
            right = memory.row(request.id, token)
            good = (right,) if state is dev.State.WARM else (right, memory.EMPTY)
            if any(cell not in good for cell in receiver.cells[token]):
                found = receiver.cells[token]
                raise Finding("rows", f"{rank.name}: {state}, token {token} holds {found}")

    def committed(self, rank: DecodeRank, receiver: Receiver) -> None:
        self.rows(rank, receiver, receiver.verdict)

    # -- the breaker

    def opened(self, receiver: Receiver, plan: object) -> None:
        sources = plan.sources if plan is not None else ()
        receiver.peers = [source.peer for source in sources]
        wanted = [source.peer for source in sources if source.heads]
        receiver.only = wanted[0] if len(wanted) == 1 else None
        strikes = self._strikes.get((receiver.rank, receiver.only), [])
        receiver.tired = len(strikes) >= 3

    def _breaker(self, rank: DecodeRank, receiver: Receiver, verdict: dev.Verdict) -> None:
        """After three rooms in a row that waited in vain, two more within a second do. Of
        rooms with several peers one alone is counted against, so they show nothing here; nor do
        those without rows, and cold ones that a warm one may have come after."""
        if receiver.only is None or receiver.request.first_token >= receiver.end:
            return
        key = rank, receiver.only
        strikes = self._strikes.setdefault(key, [])
        if verdict.state is dev.State.WARM:
            strikes.clear()
            self._warmed[key] = self.world.clock.now
            return
        if verdict.reason not in STRIKES or self._warmed.get(key, -1.0) >= receiver.opened_at:
            return
        strikes.append(self.world.clock.now)
        if receiver.tired:
            before, self._probed[key] = self._probed.get(key, -1.0), receiver.opened_at
            if 0 <= receiver.opened_at - before < 0.6:
                raise Finding("breaker", f"{rank.name} waits again for a peer that struck thrice")

    # -- SGLang's side

    def metadata_sent(self, request: object, decode: object) -> None:
        prefill = self.world.spec.servers[request.prefill[0]]
        if decode.plugin and not prefill.plugin:
            raise Finding("target", "a stripped decode and a stock prefill: the target is hurt")

    def settled(self, rank: PrefillRank, sender: Sender) -> None:
        if sender.settled:
            raise Finding("settled", f"{rank.name}: twice")
        if not sender.sent:
            return
        since = self._progress.get((rank, sender.request.number), 0.0)
        since = max(since, sender.sent_at - sender.slow_by)
        took = self._running(rank) - since
        if took > self.world.times.packing + SLACK:
            raise Finding("late settled", f"{rank.name}: {took:.2f} s without progress")

    def _running(self, process: Process) -> float:
        return self.world.clock.now - process.stopped_for

    # -- the end

    def never_at_rest(self) -> None:
        for process in self.world.places_now.values():
            if left := process.machine.left():
                raise Finding("left", f"{process.name} never comes to rest: {left}")
        raise Finding("left", "the world never comes to rest")

    def at_the_end(self) -> None:
        for process in self.world.places_now.values():
            self._at_rest(process)
        for (rank, stamp), count in self._ready.items():
            acked = self._acked[rank, stamp]
            if rank.alive and not 1 <= acked <= count:
                raise Finding("acks", f"{rank.name}: a READY was acknowledged {acked} times")
        for life in self.world.lives.values():
            if life.begun is not None:
                self._request(life)

    def _at_rest(self, process: Process) -> None:
        machine = process.machine
        if left := machine.left():
            raise Finding("left", f"{process.name}: {left}")
        for wrong in machine.check():
            raise Finding("books", f"{process.name}: {wrong}")
        slots = machine._reads.slots if isinstance(process, DecodeRank) else machine.slots
        if slots.free_slots != slots.count:
            raise Finding("left", f"{process.name}: {slots.free_slots} of {slots.count} free")

    def _request(self, life: object) -> None:
        request, world = life.request, self.world
        if not life.decode_over or not life.prefill_over:
            raise Finding("ends", f"request {request.id} never ends")
        refused = life.by == "refused" and not world.spec.servers[request.prefill[0]].plugin
        clear_failed = any(fault.mode == "clear" for fault in world.spec.faults)
        allowed = life.by == "stock" or refused or (life.by == "drafter" and clear_failed)
        if life.outcome == "failed" and not allowed:
            raise Finding("failed", f"request {request.id} by {life.by}: {life.reason}")
        if life.outcome == "ok":
            self._untouched(life)

    def _untouched(self, life: object) -> None:
        request, world = life.request, self.world
        untouched = not faults.touched(world, request)
        beside = untouched or faults.beside_dead_readers(world, request)
        own = request.abort is None and request.target_fails < 0 and request.after < 0
        roomy = faults.is_roomy(world, request)
        if not (own and roomy and (beside or request.late)):
            return
        receivers = world.groups[request.decode].receivers[request.id]
        for receiver in receivers:
            plugin = receiver.rank.place.server.plugin
            if plugin and not receiver.plan_cold and receiver.verdict is not dev.State.WARM:
                raise Finding(
                    "untouched", f"request {request.id} is {receiver.verdict} ({receiver.reason})"
                )
        world.untouched.append(life)
