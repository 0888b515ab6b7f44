"""A decode rank: its machine, the code of its worker, and SGLang's receivers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_mixkv.channel.messages import Message, encode
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.machine import Machine
from sglang_mixkv.decode.transfer import Source, instance_of
from sglang_mixkv.draft.copier import Copy, HeldBack
from sglang_mixkv.draft.slot_format import SlotCheck
from tests.sim import memory, workers
from tests.sim.copies import Copiers, Device
from tests.sim.judge import Judge
from tests.sim.network import Link, Read
from tests.sim.process import Gated, Process
from tests.sim.wire import Wire
from tests.sim.workers import Event, Receiving

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import Place, World

GOOD = (act.State.WARM, act.State.COLD)


class Receiver(Gated):
    """SGLang's receiver of one request on one rank.

    `rows`: the pool rows of the request's tokens, from `first_token` on. `closed`: whether its
    gate is closed. `targets`: the prefill ranks whose part of the target KV is still missing.
    `cleared`: whether SGLang's scheduler has cleared its rows as a last resort. `lost`: whether a
    poll has found that the channel thread is too late. With an earlier forward, the first such poll
    leaves the thread a little time, even if the polls themselves had to wait for a stopped rank.
    """

    def __init__(self, request: Request, rank: DecodeRank, end: int) -> None:
        pool, first = rank.pool, request.first_token
        self.pages = pool.take(self, (end - first) // pool.page)
        self.rows = pool.numbers(self.pages)
        self.handle = Receiving(self.pages, pool.page, Event() if request.forward else None)
        self.handle.request, self.handle.gate.rank = self, rank
        super().__init__(self.handle.gate)
        self.request, self.rank, self.end = request, rank, end
        self.generation = 0
        self.closing = self.closed = self.given_back = self.cleared = self.lost = False
        self.targets: set[int] = set()

    @property
    def verdict(self) -> act.State | None:
        return self.handle.state

    @property
    def done(self) -> bool:
        return self.has_target and self.verdict in GOOD

    @property
    def polled_out(self) -> bool:
        return self.closing or self.verdict is not None or not self.has_target

    def cells(self, token: int) -> list[int]:
        return self.rank.pool.rows[self.rows[token - self.request.first_token]]

    def poll(self) -> None:
        """Poll as the plugin's receiver does while SGLang's own status is Success."""
        rank, worker, handle = self.rank, self.rank.worker, self.handle
        if not (self.has_target and rank.alive) or self.closing or rank.stopped or self.then:
            return
        worker.target_arrived(handle)
        event = handle.event
        if handle.state is None and worker.is_lost(handle):
            if event is not None and not self.lost:
                self.held = rank.clock.now - rank.stopped_for - rank.place.times.last_resort
            self.lost = True
            rank.blocking(self, self._clear_now)
        if event is None or event.over:
            rank.world.checks.polled(rank, self, handle.state is not None)
        else:
            self.held = rank.clock.now - rank.stopped_for

    def _clear_now(self) -> None:
        rank, handle = self.rank, self.handle
        if handle.state is None:
            rank.worker.clear_now(handle)
            if handle.state is not None:
                self.cleared = True
                rank.world.checks.cleared(rank, self)
                rank.later("scheduler", 0.0, rank.group.poll, self.request)


class Links:
    """The worker's current links, by peer."""

    def __init__(self, rank: DecodeRank) -> None:
        self._rank = rank
        self.of: dict[bytes, Link] = {}

    def __contains__(self, peer: bytes) -> bool:
        return peer in self.of

    def add(self, link: Link) -> None:
        self.drop(link.peer)
        self.of[link.peer] = link

    def drop(self, peer: bytes) -> None:
        link = self.of.pop(peer, None)
        if link is not None:
            link.close()

    def send(self, peer: bytes, message: Message) -> bool:
        frame = encode(message)
        link = self.of.get(peer)
        return link is not None and link.to_prefill(frame)

    def read(self, action: act.StartRead) -> bool:
        return action.peer in self.of and self._rank.start_read(action)

    def ended(self) -> tuple[()]:
        """Return nothing: the simulator delivers reads and messages as separate calls."""
        return ()

    def received(self, ready: object) -> tuple[()]:
        return ()


class DecodeRank(Process):
    def __init__(self, world: World, place: Place, instance: bytes) -> None:
        super().__init__(world, place, instance)
        self.valid = [True] * self.slots.count  # by slot, whether its last read was valid
        self.machine = Machine(instance, self.slots, place.slot_bytes, place.times)
        self.judge, self.wire = Judge(self), Wire(self)
        self.links = Links(self)
        self.worker = workers.Decode(
            self, _links=self.links, _held=HeldBack(), _forget_peer=self._forget_peer,
            _check_peer=self._check_peer, _new_generation=world.next_number,
        )  # fmt: skip
        self.pool = memory.Pool(place.server.page, len(place.layout.heads))
        self.device = Device(self) if place.server.device else None
        self.worker._copies = self.device.copies if self.device else Copiers(self)
        self.check_calls()
        self.machine.breaker.record_failure = partial(
            self._struck, self.machine.breaker.record_failure
        )
        self.receivers: dict[int, Receiver] = {}  # by generation
        self.reads: dict[act.StartRead, Read] = {}
        self.read_faults: list[list] = []  # [fate, instance or None for all, remaining reads]
        self.known: dict[tuple[int, bytes], list[bytes]] = {}  # peers, by prefill server and name
        self.dialed: set[bytes] = set()  # peers with a link, or with one on its way to the thread
        self.stuck = 0.0  # seconds for which reads of the fate "stuck" hold their slots

    def _struck(
        self, record: Callable[..., bool], peer: bytes, generation: int, now: float
    ) -> bool:
        self.judge.struck.append((generation, peer))
        return record(peer, generation, now)

    def is_urgent(self) -> bool:
        return bool(self.reads) or super().is_urgent()

    def fate_of_read(self, peer: bytes) -> str:
        for entry in self.read_faults:
            if entry[2] and entry[1] in (None, instance_of(peer)):
                entry[2] -= 1
                return entry[0]
        return ""

    # -- prefill servers

    def connect(self, peers: list[bytes]) -> None:
        for peer in peers:
            if peer not in self.dialed:
                self.dialed.add(peer)
                self.worker.add(Link(self, peer))

    def give_up(self, peer: bytes) -> None:
        """Drop all peers of this peer's server, in the thread that watches servers."""
        for key in [key for key, peers in self.known.items() if peer in peers]:
            for one in self.known.pop(key):
                self.dialed.discard(one)
                self.worker.drop(one)

    def miss(self, server: int) -> None:
        """Drop a server that did not answer in time, if the instance in use is gone."""
        for peers in [peers for (number, _), peers in self.known.items() if number == server]:
            if not self.is_there(peers[0]):
                self.give_up(peers[0])

    def is_there(self, peer: bytes) -> bool:
        process = self.world.place_of[instance_of(peer)].process
        return process.alive and process.instance == instance_of(peer)

    def _forget_peer(self, peer: bytes) -> None:
        self.dialed.discard(peer)
        self.give_up(peer)

    def _check_peer(self, peer: bytes) -> None:
        if not self.is_there(peer):
            self.later("servers", self.rng.random() * 2, self.give_up, peer)

    # -- SGLang's side

    def open(self, request: Request, sources: tuple[Source, ...], end: int) -> Receiver:
        """Open a request after SGLang has sent its metadata."""
        receiver = Receiver(request, self, end)
        if request.forward:
            self.clock.after(request.forward, self._earlier_forward, receiver)
        with self.undisturbed():
            self.worker.open(
                receiver.handle, bootstrap_room=request.number, sources=sources,
                first_token=request.first_token, end=end,
            )  # fmt: skip
        receiver.generation = receiver.handle.opened.generation
        self.receivers[receiver.generation] = receiver
        return receiver

    def _earlier_forward(self, receiver: Receiver) -> None:
        """End an earlier forward, which still writes to the pages of a former request.

        SGLang frees none of these pages before the forward has ended.
        """
        if not self.alive:
            return
        self.pool.write(receiver.pages.tolist(), memory.EARLIER)
        receiver.handle.event.over = True
        self.later("event", self.rng.random() * 0.0004, self.on_thread, self.look)
        self._give_back(receiver)

    def target_arrived(self, receiver: Receiver) -> None:
        if receiver.closed:
            return
        receiver.note_target(self)
        if receiver.verdict is None:
            self.awaiting.add(receiver.generation)
        self.group.poll_on(receiver.request, self.worker._slowest)
        self.group.poll(receiver.request)

    def close(self, receiver: Receiver, reason: str) -> None:
        if not receiver.closing:
            receiver.closing = True
            self.blocking(receiver, self._close, receiver, reason)

    def _close(self, receiver: Receiver, reason: str) -> None:
        self.worker.close(receiver.handle, reason)
        receiver.closed = True
        self.awaiting.discard(receiver.generation)
        self._give_back(receiver)

    def _give_back(self, receiver: Receiver) -> None:
        """Free the pages once the request is closed and the earlier forward has ended."""
        forward = receiver.handle.event
        if receiver.closed and (forward is None or forward.over) and not receiver.given_back:
            receiver.given_back = True
            self.pool.give_back(receiver.pages)

    def clear_at_once(self, rows: list[int]) -> None:
        """Clear rows, in SGLang's scheduler."""
        for row in rows:
            self.pool.rows[row][:] = [memory.EMPTY] * len(self.place.layout.heads)

    # -- actions

    def before(self, action: act.Action) -> None:
        checks = self.world.checks
        match action:
            case act.Send():
                checks.decode_sends(self, action.peer, action.message)
            case act.Verdict(handle):
                checks.verdict(self, handle.request, action)
            case act.Note():
                checks.noted(self, action)

    def after(self, action: act.Action) -> None:
        if type(action) is act.Verdict:
            receiver = action.handle.request
            self.awaiting.discard(receiver.generation)
            self.later("scheduler", 0.0, self.group.poll, receiver.request)

    def start_read(self, action: act.StartRead) -> bool:
        read = Read(self, action)
        for segment in action.segments:
            self.world.checks.read_begun(self, segment.slot)
        self.reads[action] = read
        self.wire.read_begun(action.peer, (one.stamp for one in read.announced))
        read.start()
        return True

    def read_ended(self, read: Read) -> None:
        del self.reads[read.action]
        generation = read.segments[0].request.generation
        self.wire.read_ended(read.peer, generation, (one.stamp for one in read.announced))
        for segment, valid in zip(read.segments, read.valid, strict=True):
            self.valid[segment.slot] = valid

    # -- copies

    def owner_of(self, copy: Copy) -> Receiver:
        return copy.job.request.opened.handle.request

    def refusal(self, copy: Copy) -> Any:
        """Return why the copy writes nothing, or None if it may write."""
        if self.errors.get(copy.kind):
            self.errors[copy.kind] -= 1
            return RuntimeError("injected")
        if copy.kind == "unpack":
            found = memory.check(self.memory[copy.slot], copy.tokens, copy.stamp)
            if found is not SlotCheck.OK:
                self.world.seen[found.name, bool(self.device), self.valid[copy.slot]] += 1
                return found
        return None

    def begin_copy(self, receiver: Receiver, copy: Copy) -> None:
        self.world.checks.copy_begun(self, receiver, copy)

    def copy(self, receiver: Receiver, rows: list[int], done: int, copy: Copy) -> None:
        if not rows:
            return
        self.world.checks.pool_written(self, receiver, rows)
        cells, own, heads = self.pool.rows, receiver.rank.place.layout.heads, copy.heads
        if copy.kind == "clear":
            self.zero(receiver, rows, own)
            return
        there, left, count = self.memory[copy.slot], heads.start - own.start, len(heads)
        for number, row in enumerate(rows, 1 + done):
            cells[row][left : left + count] = [memory.unpacked(there[number], heads)] * count

    def zero(self, receiver: Receiver, rows: list[int], heads: range) -> None:
        """Zero the given heads of these rows."""
        self.world.checks.pool_written(self, receiver, rows)
        left, count = heads.start - self.place.layout.heads.start, len(heads)
        for row in rows:
            self.pool.rows[row][left : left + count] = [memory.EMPTY] * count

    def end_copy(self, receiver: Receiver, copy: Copy) -> SlotCheck:
        if copy.kind == "unpack":
            self.world.checks.used(self, copy)
        return SlotCheck.OK

    def left_gate(self, receiver: Receiver) -> None: ...
