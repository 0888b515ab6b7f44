"""The invariants, which must hold under every fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang_mixkv.channel.messages import Ack, Fail, Message, Open, Ready
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode.transfer import instance_of
from sglang_mixkv.draft.copier import Copy
from sglang_mixkv.draft.slot_format import SlotCheck
from sglang_mixkv.prefill.actions import PagesReleased
from sglang_mixkv.series import NOTES
from tests.rig.channel.invariants import outstanding, violations
from tests.sim import memory
from tests.sim.finding import Finding
from tests.sim.spared import is_spared

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank, Receiver
    from tests.sim.network import Link
    from tests.sim.prefill import PrefillRank, Sender
    from tests.sim.process import Gated, Process
    from tests.sim.spec import Request, Server, Where
    from tests.sim.world import World

CHECKED = 3  # check a machine's invariants after every third step with actions
PROMPT = 0.01  # seconds that one pass of the channel thread may take to collect events
SLACK = 0.5  # seconds for ticks and copies, on top of a deadline


class Checks:
    def __init__(self, world: World) -> None:
        self.world, self._turn = world, 0
        self._ready: Counter[tuple[DecodeRank, int]] = Counter()  # READYs received, by stamp
        self._acked: Counter[tuple[DecodeRank, int]] = Counter()
        self._progress: dict[tuple[PrefillRank, int], float] = {}  # time, by room number
        self._current: dict[tuple[PrefillRank, int], Sender] = {}  # by room number
        self._opens: dict[bytes, list[int]] = {}  # generations, by connection
        self._over: set[tuple[PrefillRank, int]] = set()  # generations that the rank has ended
        self._opened: set[tuple[DecodeRank, bytes, int]] = set()  # peer and generation of an OPEN
        self._closed: set[tuple[DecodeRank, bytes, int]] = set()  # peer and generation that ended
        self._cause: dict[tuple[PrefillRank, int], float] = {}  # last event that may release pages
        self._ends: dict[PrefillRank, float] = {}  # time of the last event that ends a transfer
        self._served: dict[tuple[Where, int], list[float]] = {}  # times of READYs and reads
        self._done: set[tuple[Where, int]] = set()  # pairs of rank and server with a finished read
        self._heard: dict[tuple[Where, int], float] = {}  # first message of a generation
        self._reader: dict[int, bytes] = {}  # by generation
        self._lied: set[int] = set()  # stamps of READYs that may be false
        self._lost: set[int] = set()  # stamps of ACKs that were not sent
        self._restored: set[Process] = set()  # whose machine knows that its data plane is dead
        self._unpacked: set[tuple[PrefillRank, int]] = set()  # generations with a failed copy

    # -- invariants

    def invariants(self, process: Process) -> None:
        self._turn += 1
        if self._turn % CHECKED == 0:
            for wrong in violations(process.machine):
                raise Finding("invariants", f"{process.name}: {wrong}")

    def before_call(self, process: Process, name: str, args: tuple) -> None:
        """Record a call before the machine handles it."""
        match name, args:
            case "ready", (peer, message):
                key = process.place.where, message.generation
                self._heard.setdefault(key, process.now)
                if self._lies(peer):
                    self._lied.update(one.stamp for one in message.segments)
                self._ready.update((process, one.stamp) for one in message.segments)
                if message.last:
                    self._closed.add((process, peer, message.generation))
            case "failed", (peer, message):
                self._closed.add((process, peer, message.generation))
            case "received", (connection, Open() as message):
                self._cause[process, message.room] = self._ran(process)
                self._heard.setdefault((process.place.where, message.generation), process.now)
                self._reader[message.generation] = message.reader
                self._progress[process, message.room] = self._running(process)
                self._opens.setdefault(connection, []).append(message.generation)
                # a duplicate OPEN may arrive after the machine forgot the generation
                self._over.discard((process, message.generation))
            case "received", (connection, Ack()):
                link = self.world.connections.get(connection)
                if link is not None:
                    self._done.add((process.place.where, link.reader.place.server.number))
            case "read_ended", (read, ""):
                self._done.add((process.place.where, process.judge.server_of(read)))
            case "received", (_, Fail() as message):
                self._ends[process] = self._ran(process)
                self.part_over(process, message.generation)
            case "connection_lost", (connection,):
                self._ends[process] = self._ran(process)
                for generation in self._opens.pop(connection, ()):
                    self.part_over(process, generation)
            case "unsent", (message,):
                self._ends[process] = self._ran(process)
                self.part_over(process, message.generation)
            case "copied", (jobs, outcome) if outcome not in (SlotCheck.OK, None):
                self._not_copied(process, jobs)
            case "begin", (handle, number):
                self._cause[process, number] = self._ran(process)
                former = self._current.get((process, number))
                if former is not None:
                    former.over = True
                self._current[process, number] = handle.sender
            case "restored", ():
                self._restored.add(process)
                self._ends[process] = self._ran(process)
            case "end", (handle, _):
                self._ends[process] = self._ran(process)
                handle.sender.over = True

    def after_call(self, process: Process, name: str, args: tuple) -> None:
        """Check a call after the machine has handled it."""
        if process.place.server.side == "decode":
            process.judge.after_call(name, args, process.now)
        elif name == "unsent":
            announced = getattr(args[0], "segments", ())
            if any(process.publishes(one.slot, one.stamp) for one in announced):
                raise Finding("unsent", f"{process.name} retains slots of an unsent READY")

    def after_pass(self, process: Process, actions: list) -> None:
        """Check the actions of one pass of the channel thread."""
        if process.place.server.side == "decode":
            for action in actions:
                if type(action) is dact.StartRead:
                    self._note_served(process, instance_of(action.peer))
            process.judge.after_pass(actions)
        elif actions:
            self._after_prefill_pass(process, actions)

    def _after_prefill_pass(self, rank: PrefillRank, actions: list) -> None:
        """Check that Success waits only for packing.

        Pages are released as soon as an event allows it, or when the request is given up. A
        request that is given up causes a "slow" Fail or an "unopened" note.
        """
        released, given_up = [], False
        for action in actions:
            match action:
                case dact.Send(_, Fail() as message):
                    self._cause[rank, message.room] = self._ran(rank)
                    given_up = given_up or message.code == "slow"
                case dact.Send(_, Ready() as message) if message.last:
                    self._cause[rank, message.room] = self._ran(rank)
                case dact.Note("unopened"):
                    given_up = True
                case PagesReleased(handle):
                    released.append(handle.sender.request.number)
        for number in released:
            took = self._ran(rank) - max(
                self._cause.get((rank, number), 0.0), self._ends.get(rank, 0.0)
            )
            if took > PROMPT and not (given_up or rank.slow_step):
                raise Finding("late release", f"{rank.name}: {took:.3f} s after its last transfer")

    def cleared(self, rank: DecodeRank, receiver: Receiver) -> None:
        """Check the rows that SGLang's scheduler has cleared as its last resort."""
        self.last_resort(rank, receiver.target_at)
        self.rows(rank, receiver, receiver.verdict)

    def polled(self, rank: Process, handle: Gated, is_over: bool) -> None:
        """Check that a poll which waits only for the drafter does not wait too long.

        A request with a hanging copy may wait longer, since the copy still touches pages.
        """
        waited = self._running(rank) - max(handle.target_at - handle.slow_by, handle.held)
        if not (is_over or handle.copies) and waited > 2 * rank.place.times.whole_wait + 1.0:
            raise Finding("undecided", f"{rank.name}: {waited:.2f} s after the target")

    def last_resort(self, rank: Process, target_at: float) -> None:
        """Check that SGLang's scheduler was right to decide instead of the channel thread."""
        waited = self.world.clock.now - target_at
        if not rank.broken and waited < 2 * rank.place.times.whole_wait:
            raise Finding("last resort", f"{rank.name}: {waited:.2f} s after the target")
        if not (rank.broken or rank.hung or rank.hung_for or rank.stopped_for):
            raise Finding("last resort", f"{rank.name}: its channel thread runs normally")

    def _lies(self, peer: bytes) -> bool:
        liars = self.world.liars
        return bool(liars) and self.world.place_of[instance_of(peer)].server.number in liars

    def part_over(self, rank: PrefillRank, generation: int) -> None:
        """Record that either side has ended this rank's part of a transfer."""
        self._over.add((rank, generation))

    def decode_sends(self, rank: DecodeRank, peer: bytes, message: Message) -> None:
        match message:
            case Ack(slots):
                rank.wire.acknowledged(stamp for _, stamp in slots)
                for _, stamp in slots:
                    self._acknowledged(rank, stamp)
            case Open() if message.wanted:
                self._opened.add((rank, peer, message.generation))
            case Fail():
                self._closed.add((rank, peer, message.generation))

    def on_action_failed(self, process: Process, action: object) -> None:
        """Record a failed action, whose message is lost."""
        if type(action) is dact.Send and type(action.message) in (Open, Fail):
            self._closed.add((process, action.peer, action.message.generation))
        elif type(action) is dact.Send and type(action.message) is Ack:
            self._lost.update(stamp for _, stamp in action.message.slots)
        elif type(action) is dact.StartCopies:
            self._not_copied(process, action.jobs)

    def _not_copied(self, process: Process, jobs: Iterable[Any]) -> None:
        if process.place.server.side == "prefill":
            generations = {one.transfer.opened.generation for one in jobs}
            self._unpacked.update((process, generation) for generation in generations)

    def noted(self, process: Process, note: object) -> None:
        if note.what not in NOTES:
            raise Finding("note", f"{process.name}: {note.what} has no metric and no log text")

    def _acknowledged(self, rank: DecodeRank, stamp: int) -> None:
        self._acked[rank, stamp] += 1
        if self._acked[rank, stamp] > self._ready[rank, stamp]:
            raise Finding("acks", f"{rank.name} acknowledges a READY twice")
        if stamp not in self._lied and any(
            stamp == one.stamp for read in rank.reads.values() for one in read.announced
        ):
            raise Finding("acks", f"{rank.name} acknowledges a slot that it still reads")

    def ready_sent(self, rank: PrefillRank, link: Link | None, ready: Ready) -> None:
        """Check a READY.

        `link` is None if the reader is gone and this rank has not noticed yet.
        """
        if rank in self._restored and ready.segments:
            raise Finding("restored", f"{rank.name} announces slots that no reader can read")
        self._progress[rank, ready.room] = self._running(rank)
        self._note_served(rank, self._reader[ready.generation])
        for one in ready.segments:
            if memory.check(rank.memory[one.slot], one.count, one.stamp) is not SlotCheck.OK:
                raise Finding("slot", f"{rank.name} announces a segment that its slot lacks")
        packed = [rank.packed[one.stamp].over for one in ready.segments]
        if (rank, ready.generation) in self._over or any(packed):
            raise Finding("over", f"{rank.name} sends a READY after its transfer has ended")
        if link is not None and link.instance != rank.instance:
            raise Finding("instance", f"{rank.name} serves a reader of an earlier instance")

    def _note_served(self, rank: Process, other: bytes) -> None:
        if (place := self.world.place_of.get(other)) is not None and self.world.spec.faults:
            key = rank.place.where, place.server.number
            self._served.setdefault(key, []).append(rank.now)

    def had_slots(self, here: Server, others: set[int]) -> bool:
        """Return whether any rank of `here` has completed a read with one of the other servers."""
        ranks = range(here.tp)
        return any(((here.number, rank), other) in self._done for rank in ranks for other in others)

    def was_heard(self, here: Server, request: Request, others: set[int]) -> bool:
        """Return whether each rank of `here` has recently had a message of this request.

        Recently means at least `Times.unsure` after the rank last served one of the `others`.
        """
        unsure = Times(here.patience).unsure
        ended = self.world.lives[request.id].ended
        for receiver in self.world.groups[request.decode].handles[request.id]:
            for rank in range(here.tp):
                where = here.number, rank
                since = self._heard.get((where, receiver.generation))
                if since is None or (here.side == "decode" and receiver.rank.place.where != where):
                    continue
                for other in others:
                    times = self._served.get((where, other), ())
                    if any(since - unsure <= when <= ended for when in times):
                        return False
        return True

    def fail_sent(self, rank: PrefillRank, message: Fail) -> None:
        """Check that a Fail with the code "pack" follows a failed copy.

        A copy that a closed gate stops has not failed, since its request has ended.
        """
        self.part_over(rank, message.generation)
        if message.code == "pack" and (rank, message.generation) not in self._unpacked:
            raise Finding("pack", f"{rank.name}: no copy for {message.generation} has failed")

    # -- the pool

    def pool_written(self, rank: DecodeRank, receiver: Receiver, rows: list[int]) -> None:
        if receiver.closed:
            raise Finding("gate", f"{rank.name}: rows are written after the room was closed")
        if receiver.verdict is not None:
            raise Finding("verdict", f"{rank.name}: rows are written after their verdict")
        page, owners = rank.pool.page, rank.pool.owners
        if any(owners[row // page] is not receiver for row in rows):
            raise Finding("pages", f"{rank.name}: rows {rows} belong to another room")

    def copy_begun(self, rank: DecodeRank, receiver: Receiver, copy: Copy) -> None:
        others = [one for one in receiver.copies.values() if one is not copy]
        if any(one.kind == "clear" for one in (copy, *others)) and others:
            raise Finding("clear", f"{rank.name} clears rows while others are written")
        token = receiver.request.first_token + copy.first
        first = receiver.cells(token) if copy.kind == "clear" else []
        right = memory.row(receiver.request.id, token)
        if first and all(cell == right for cell in first):
            raise Finding("clear", f"{rank.name} clears a row that is already correct")

    def pool_read(self, rank: PrefillRank, sender: Sender) -> None:
        if sender.succeeded or sender.given_back:
            raise Finding("pages", f"{rank.name} reads rows of a request that may have ended")

    def packed(self, rank: PrefillRank, sender: Sender, token: int, found: int) -> None:
        if found != memory.row(sender.request.id, token):
            raise Finding("unwritten", f"{rank.name} packs token {token}, which holds {found}")

    def read_begun(self, rank: DecodeRank, slot: int) -> None:
        if any(one.slot == slot for read in rank.reads.values() for one in read.segments):
            raise Finding("landing", f"{rank.name}: two reads may land in slot {slot}")

    def packs(self, rank: PrefillRank, sender: Sender) -> None:
        if rank in self._restored:
            raise Finding("restored", f"{rank.name} packs rows that no reader can read")
        if sender.pages_released or sender.over:
            raise Finding("released", f"{rank.name} packs rows of a request that may have ended")

    def used(self, rank: DecodeRank, copy: Copy) -> None:
        lied = rank.owner_of(copy).request.prefill in self.world.liars
        hidden = any(fault.hides_time for fault in self.world.spec.faults)
        if not (rank.valid[copy.slot] or lied):
            self.world.seen["overstayed"] += 1
        if not (rank.valid[copy.slot] or lied or hidden):
            raise Finding("lease", f"{rank.name} unpacks a slot that was reused during the read")

    def verdict(self, rank: DecodeRank, receiver: Receiver, verdict: dact.Verdict) -> None:
        if receiver.verdict is not None:
            if not receiver.cleared:
                raise Finding("verdict", f"{rank.name}: two verdicts")
            return
        self.rows(rank, receiver, verdict.state)
        if receiver.has_target and not (rank.hung_for or receiver.request.holds_slots):
            took = self._running(rank) - receiver.target_at + receiver.slow_by
            if took > rank.place.times.whole_wait + SLACK:
                raise Finding("late verdict", f"{rank.name}: {took:.2f} s after the target")

    def rows(self, rank: DecodeRank, receiver: Receiver, state: dact.State) -> None:
        lied = receiver.request.prefill in self.world.liars
        if state is dact.State.FAILED or receiver.given_back or lied:
            return
        request = receiver.request
        for token in range(request.first_token, request.prompt):
            right = memory.row(request.id, token)
            good = (right,) if state is dact.State.WARM else (right, memory.EMPTY)
            if any(cell not in good for cell in receiver.cells(token)):
                found = receiver.cells(token)
                raise Finding("rows", f"{rank.name}: {state}, token {token} holds {found}")

    # -- SGLang's side

    def released(self, rank: PrefillRank, sender: Sender) -> None:
        if sender.pages_released:
            raise Finding("released", f"{rank.name} releases pages twice")
        if not sender.has_target or sender.at_last or rank.hung_for:
            return
        since = self._progress.get((rank, sender.request.number), 0.0)
        since = max(since, sender.target_at - sender.slow_by)
        took = self._running(rank) - since
        if took > rank.place.times.packing + SLACK:
            raise Finding("late release", f"{rank.name}: {took:.2f} s without progress")

    def _running(self, process: Process) -> float:
        return self.world.clock.now - process.stopped_for

    def _ran(self, process: Process) -> float:
        """Return how long the channel thread has run."""
        return self._running(process) - process.hung_for

    # -- the end

    def at_the_end(self) -> None:
        for place in self.world.places.values():
            if place.process.alive and not place.process.broken:
                self._at_rest(place.process)
        for (rank, stamp), count in self._ready.items():
            acked = self._acked[rank, stamp]
            if (
                rank.alive
                and not rank.broken
                and not 1 <= acked <= count
                and stamp not in self._lost
                and stamp not in self._lied
            ):
                raise Finding("acks", f"{rank.name}: READY {stamp} was acknowledged {acked} times")
        for rank, peer, generation in self._opened - self._closed:
            if rank.alive and not rank.broken:
                raise Finding("fail", f"{rank.name} never sends {peer} the end of {generation}")
        for life in self.world.lives.values():
            if life.begun is not None:
                self._request(life)

    def _at_rest(self, process: Process) -> None:
        machine = process.machine
        if left := outstanding(machine):
            raise Finding("left", f"{process.name}: {left}")
        for wrong in violations(machine):
            raise Finding("invariants", f"{process.name}: {wrong}")
        slots = process.slots
        if len(slots.free_slots) != slots.count:
            raise Finding("left", f"{process.name}: {len(slots.free_slots)} of {slots.count} free")

    def _request(self, life: object) -> None:
        request, world = life.request, self.world
        if not life.decode_over or not life.prefill_over:
            raise Finding("ends", f"request {request.id} never ends")
        clear_failed = any(fault.keeps_rows for fault in world.spec.faults)
        allowed = life.by == "stock" or (life.by == "drafter" and clear_failed)
        if life.outcome == "failed" and not allowed:
            raise Finding("failed", f"request {request.id} by {life.by}: {life.reason}")
        own = life.outcome == "ok" and request.abort is None and request.after < 0
        if not own or not is_spared(world, request):
            return
        for one in world.groups[request.decode].handles[request.id]:
            if one.verdict is not dact.State.WARM:
                if one.handle.reason == "breaker" and self._may_break(request):
                    return
                raise Finding(
                    "untouched", f"request {request.id}: {one.verdict} ({one.handle.reason})"
                )
        world.untouched.append(life)

    def _may_break(self, request: Request) -> bool:
        """Return whether requests that need not be warm may have opened the breaker meanwhile. The
        judge checks their strikes."""
        pair, others = (request.prefill, request.decode), self.world.spec.requests
        same = (one for one in others if (one.prefill, one.decode) == pair)
        return not all(is_spared(self.world, one) for one in same)
