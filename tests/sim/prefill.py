"""A prefill rank: its machine, the code of its worker, and SGLang's senders on it."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import zmq

from sglang_mixkv.channel.actions import Note, Send, StartCopies
from sglang_mixkv.channel.messages import Fail, Ready, decode
from sglang_mixkv.draft.copier import Copy, HeldBack
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.slot_format import SlotCheck
from sglang_mixkv.prefill.actions import Action, PagesReleased
from sglang_mixkv.prefill.machine import Machine
from tests.sim import memory, workers
from tests.sim.copies import Copiers, Device
from tests.sim.process import Gated, Process
from tests.sim.workers import Event

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import Place, World


class Sender(Gated):
    """SGLang's sender of one request on one rank.

    `rows`: the pool rows of its tokens. `pages_released`: whether the machine has released its
    pages. `succeeded`: whether SGLang's Success was reported. `at_last`: whether the scheduler
    reported it as a last resort. `given_back`: whether its pages may belong to another request.
    `over`: whether the machine was notified that the request ended or that another took its number.
    """

    def __init__(self, request: Request, number: int, rank: PrefillRank) -> None:
        with rank.undisturbed():
            self.handle = rank.worker.begin(request.number)
        self.handle.sender, self.handle.gate.rank = self, rank
        super().__init__(self.handle.gate)
        self.request, self.number, self.rank = request, number, rank
        self.pages = rank.pool.take(self, -(-request.prompt // rank.pool.page))
        self.rows = rank.pool.numbers(self.pages)
        self.events: deque[Event] = deque()  # of chunks that are not yet written
        self.pages_released = self.succeeded = self.ended = self.given_back = self.over = False
        self.at_last = False

    @property
    def polled_out(self) -> bool:
        return self.ended or self.succeeded or not self.has_target

    def poll(self) -> bool:
        """Poll as the plugin's sender does. Return whether Success is reported."""
        rank = self.rank
        if not rank.alive or rank.stopped:
            return self.succeeded
        if self.has_target and not (self.succeeded or self.ended):
            self.succeeded = rank.worker.release(self.handle)
            if self.handle.pages_released and not self.pages_released and not self.at_last:
                self.at_last = True
                rank.awaiting.discard(self.number)
                rank.world.checks.last_resort(rank, self.target_at)
            if self.handle.pages_released and not (self.succeeded or self.copies):
                rank.later("scheduler", 0.001, rank.group.poll, self.request)
            rank.world.checks.polled(rank, self, self.succeeded)
        return self.succeeded


class Socket:
    """A ROUTER socket, which raises once it has noticed that a connection is gone."""

    def __init__(self, rank: PrefillRank) -> None:
        self._rank, self._to = rank, b""

    def send(self, data: bytes, flags: int) -> None:
        world, to = self._rank.world, self._to
        link = world.connections.get(to or data)
        if link is None and self._rank.clock.now >= world.unnoticed.get(to or data, 0.0):
            self._to = b""
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._to = b"" if to else data
        if to:
            decode(data)  # raises if a decode rank could not read the message
            if link is not None:
                link.to_decode(data)


class PrefillRank(Process):
    def __init__(self, world: World, place: Place, instance: bytes) -> None:
        super().__init__(world, place, instance)
        self.machine = Machine(
            instance, place.layout.heads, self._segment_tokens, self.slots, place.times,
            world.next_number,
        )  # fmt: skip
        self.worker = workers.Prefill(
            self, _socket=Socket(self), _poller=SimpleNamespace(used=set()), _held=HeldBack(),
            _lost=set(),
        )  # fmt: skip
        self.pool = memory.Pool(place.server.page, 1)
        self.device = Device(self) if place.server.device else None
        self.worker._copies = self.device.copies if self.device else Copiers(self)
        self.check_calls()
        self.senders: dict[int, Sender] = {}  # by the sender's own number
        self.packed: dict[int, Sender] = {}  # the owner of a slot's rows, by stamp

    def _segment_tokens(self, heads: int, slot_bytes: int) -> int:
        return self.place.layout.facts.tokens_in(min(slot_bytes, self.place.slot_bytes), heads)

    def publishes(self, slot: int, stamp: int) -> bool:
        """Return whether the slot is published to a reader under this stamp."""
        return self.alive and self.slots._published.get(slot, (0, None))[1] == stamp

    # -- SGLang's side

    def begin(self, request: Request) -> Sender:
        sender = Sender(request, self.world.next_number(), self)
        self.senders[sender.number] = sender
        return sender

    def add_chunk(self, sender: Sender, first: int, count: int, last: bool, pending: bool) -> None:
        page, events = self.pool.page, [Event()] if pending else []
        sender.events.extend(events)
        pages = Pages(sender.pages[first // page : -(-(first + count) // page)], page, events)
        self.worker.add_chunk(sender.handle, first, count, last, pages)

    def write(self, sender: Sender, first: int, count: int) -> None:
        """Write rows as a forward does, even while the process's threads are stopped."""
        for token in range(first, first + count):
            self.pool.rows[sender.rows[token]][0] = memory.row(sender.request.id, token)

    def written(self, sender: Sender) -> None:
        """Complete the event recorded after the forward, which the channel thread polls."""
        sender.events.popleft().over = True
        self.later("queue", self.rng.random() * 0.0002, self.on_thread, self.look)

    def target_sent(self, sender: Sender) -> None:
        sender.note_target(self)
        self.awaiting.add(sender.number)
        self.group.poll_on(sender.request, self.worker._slowest)

    def end(self, sender: Sender, reason: str) -> None:
        """End a request in the scheduler's thread.

        A successful request frees its pages first, a failed one only after the plugin's `end`.
        """
        sender.ended = True
        self.awaiting.discard(sender.number)
        delay = self.rng.random() * (0.0005 if reason else 0.001)
        if not reason:
            self._give_back(sender)
        self.later("scheduler", delay, self.blocking, sender, self._end, sender, reason)

    def _end(self, sender: Sender, reason: str) -> None:
        self.worker.end(sender.handle, reason)
        if reason:
            self._give_back(sender)

    def _give_back(self, sender: Sender) -> None:
        sender.given_back = True
        self.pool.give_back(sender.pages)

    # -- actions

    def before(self, action: Action) -> None:
        checks = self.world.checks
        match action:
            case Send(connection, Ready() as ready):
                checks.ready_sent(self, self.world.connections.get(connection), ready)
            case Send(connection, Fail() as message):
                checks.fail_sent(self, message)
            case StartCopies(segments):
                for one in segments:
                    self.packed[one.stamp] = one.transfer.request.handle.sender
                    checks.packs(self, one.transfer.request.handle.sender)
            case PagesReleased(handle):
                checks.released(self, handle.sender)
            case Note():
                checks.noted(self, action)

    def after(self, action: Action) -> None:
        if type(action) is PagesReleased:
            sender = action.handle.sender
            sender.pages_released = True
            self.awaiting.discard(sender.number)
            self.later("scheduler", 0.0, self.group.poll, sender.request)

    # -- copies

    def owner_of(self, copy: Copy) -> Sender:
        return copy.job.transfer.request.handle.sender

    def refusal(self, copy: Copy) -> Any:
        return None

    def begin_copy(self, sender: Sender, copy: Copy) -> None:
        self.world.checks.pool_read(self, sender)
        self.memory[copy.slot][0] = copy.stamp

    def copy(self, sender: Sender, rows: list[int], done: int, copy: Copy) -> None:
        if rows:
            self.world.checks.pool_read(self, sender)
        there, pool = self.memory[copy.slot], self.pool.rows
        for number, row in enumerate(rows, 1 + done):
            self.world.checks.packed(self, sender, copy.job.first + number - 1, pool[row][0])
            there[number] = memory.packed(pool[row][0], copy.heads)

    def end_copy(self, sender: Sender, copy: Copy) -> Any:
        slot = self.memory[copy.slot]
        slot[copy.tokens + 1] = memory.checksum(slot[1 : copy.tokens + 1], copy.stamp)
        if self.errors.get("pack"):
            self.errors["pack"] -= 1
            return RuntimeError("the copy failed")
        return SlotCheck.OK

    def left_gate(self, sender: Sender) -> None:
        """Poll the request again, since its last copy may have ended."""
        if sender.handle.pages_released and sender.has_target and not sender.ended:
            self.group.poll(sender.request)
