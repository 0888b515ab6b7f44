"""The connections between processes, for messages, and the data plane.

A connection keeps its messages in order, and loses one only by breaking. A read covers several
slots, and ends as a whole. Bytes may land until it has ended, however long that takes, but not
afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mixkv.channel.loop import Call
from sglang_mixkv.channel.messages import Ready, decode
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode.transfer import instance_of
from tests.sim import memory

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.world import Place


class Link:
    """A decode rank's socket for one peer, an instance; it is connected to the peer's address.

    `connection`: prefill's name for it, a new one after each break. `blocked`: until then nothing
    passes, and what waits longer than TCP's time-out is lost. `closed`: the decode rank has dropped
    it."""

    def __init__(self, reader: DecodeRank, peer: bytes) -> None:
        self.reader, self.peer = reader, peer
        self.world, self.clock, self.rng = reader.world, reader.clock, reader.rng
        self.instance = instance_of(peer)
        self.place: Place = self.world.place_of[self.instance]
        self.epoch = 0
        self.names: dict[int, bytes] = {}  # its connections, by epoch
        self.connection = b""
        self.blocked = 0.0
        self.slow = 0.0  # so much delay at most; until `slow_until`
        self.slow_until = 0.0
        self.doubles = 0
        self.closed = False
        self.overtaken: dict[int, float] = {}  # seconds by which what an epoch carried comes later
        self.heard: list[Ready] = []  # that a liar has sent
        self._arrivals = {"prefill": 0.0, "decode": 0.0}
        self._connect()
        self.world.links.append(self)

    def __repr__(self) -> str:
        return f"link to {self.peer!r}"

    def _connect(self) -> None:
        self.connection = self.names[self.epoch] = b"%d" % self.world.next_number()
        self.world.connections[self.connection] = self

    # -- messages

    def to_prefill(self, frame: bytes) -> bool:
        """Return whether it left."""
        if self.place.process.alive and self.connection:
            self._carry("prefill", frame)
            return True
        return self._leaves()

    def to_decode(self, frame: bytes) -> None:
        self._carry("decode", frame)
        if self.place.server.number in self.world.liars:
            message = decode(frame)
            if type(message) is Ready:
                self.heard.append(message)

    def _carry(self, way: str, frame: bytes) -> None:
        now, rng = self.clock.now, self.rng
        delay = 0.00005 + rng.random() ** 3 * 0.002
        if now < self.slow_until:
            delay += rng.random() * self.slow
        when = max(self._arrivals[way], now + delay)
        if self.blocked > now:
            when = max(when, self.blocked + delay)
        when = min(when, max(self._arrivals[way], now + self.place.times.delivery))
        self._arrivals[way] = when
        self.clock.at(when, self._arrive, way, self.epoch, frame)
        if self.doubles and rng.random() < 0.7:
            self.doubles -= 1
            self._arrivals[way] = when = when + rng.choice((0.0, 0.001, 0.02, 0.5)) * rng.random()
            self.clock.at(when, self._arrive, way, self.epoch, frame)

    def _arrive(self, way: str, epoch: int, frame: bytes) -> None:
        if epoch != self.epoch:
            self._arrive_late(way, epoch, frame)
            return
        try:
            message = decode(frame)
        except ValueError:  # a number that the other side does not read; counted, and dropped
            return
        if way == "prefill":
            process, sender = self.place.process, self.connection
            method = process.machine.received
        else:
            process, sender = self.reader, self.peer
            method = process.machine.ready if type(message) is Ready else process.machine.failed
            if type(message) is Ready:
                process.wire.came(self.peer, message)
        process.step(self.connection, process.handle, ((method, (sender, message)),))

    def _arrive_late(self, way: str, epoch: int, frame: bytes) -> None:
        """Deliver what a former connection carried to prefill, behind what later ones do."""
        if way == "prefill" and epoch in self.overtaken:
            former, process = self.names[epoch], self.place.process
            received = process.machine.received, (former, decode(frame))
            delay = self.rng.random() * self.overtaken[epoch]
            process.later(former, delay, process.handle, received)

    # -- trouble

    def end(self, silent: bool = False) -> None:
        """Lose the connection, and everything on its way; the next one is a new connection.
        `silent`: this is noticed late."""
        if not self.connection:
            return
        former, self.epoch = self.connection, self.epoch + 1
        del self.world.connections[former]
        self.connection = b""
        if self.reader.alive and not self.closed:
            self._connect()
        times, rng, now = self.place.times, self.rng, self.clock.now
        if silent:  # the kernel asks now and then, and gives up
            self.world.unnoticed[former] = now + (1 + rng.random()) * times.delivery
            return
        delay = rng.choice((0.0, 0.01, 1.0, 5.0)) * rng.random()
        self.world.unnoticed[former] = now + delay
        process = self.place.process
        if process.alive and rng.random() < 0.7:
            lost = process.machine.connection_lost, (former,)
            process.later(former, delay, process.handle, lost)
        if not self.closed and not self._leaves():
            self.reader.post(self._lost())

    def close(self) -> None:
        """Close the link, which the decode rank has replaced or dropped."""
        self.closed = True
        self.end(silent=self.rng.random() < 0.3)

    def cut(self, seconds: float) -> None:
        """Let nothing pass for so long; TCP gives up within the time of delivery."""
        self.blocked = self.clock.now + seconds
        if seconds > self.place.times.delivery:
            self.clock.after(self.place.times.delivery, self.end)

    def _leaves(self) -> bool:
        """Return whether a message seems to leave: the reader notices immediately, later, or
        never."""
        chance, reader = self.rng.random(), self.reader
        if reader.alive and 0.4 <= chance < 0.7:
            reader.later("lost", self.rng.random() * 8, reader.handle, self._lost())
        return chance >= 0.4 or not reader.alive

    def _lost(self) -> Call:
        return self.reader.machine.peer_lost, (self.peer,)


READ_FAULTS = ("fail", "hang", "late", "slow", "wrong")


class Read:
    """`valid`: for each segment, whether the remote slot was the reader's all the time. `fate`: ""
    if nothing goes wrong."""

    def __init__(self, rank: DecodeRank, action: dact.StartRead) -> None:
        self.rank, self.action, self.segments = rank, action, action.segments
        self.announced = [one.announced for one in self.segments]
        instance = instance_of(action.peer)
        self.place = place = rank.world.place_of[instance]
        self.remote = place.process if place.process.instance == instance else None
        self.peer = action.peer
        self.world, self.clock, self.rng = rank.world, rank.clock, rank.rng
        sizes = [min(one.count, memory.TOKENS) + 2 for one in self.announced]  # a liar's have 2^30
        self.pieces = [(n, i) for n, size in enumerate(sizes) for i in range(size)]
        self.rng.shuffle(self.pieces)
        self.copied = 0
        self.valid = [True] * len(self.segments)
        self.fate = rank.fate_of_read(action.peer)

    def start(self) -> None:
        rng, late = self.rng, self.rank.place.times.read
        match self.fate:
            case "fail":
                seconds = 0.01 + rng.random() * rng.choice((0.01, 2))
            case "hang":
                seconds = late + rng.choice((2, 35)) * rng.random()
            case "stuck":
                seconds = late + self.rank.stuck + rng.random()
            case "late":
                seconds = max(0.0, late - 0.2) + rng.random() * 4
            case "slow":
                seconds = rng.random() * 0.9 * late
            case _:
                seconds = rng.random() ** 4 * self.world.copying
        self.clock.after(min(seconds * rng.random(), 0.02), self._step, self._stick)
        self.clock.after(seconds, self._step, self._rest)

    def _step(self, call: object) -> None:
        """Make a step. Over TCP both processes take part in each copy; over RDMA neither does."""
        if not self.rank.alive:
            return
        if self.remote is None or not self.remote.alive:
            self._peer_is_dead()
            return
        for process in (self.rank, self.remote) if self.world.spec.over_tcp else ():
            if process.stopped:
                process.park("plane", self._step, (call,))
                return
        call()

    def _copy(self, end: int) -> None:
        for number, piece in self.pieces[self.copied : end]:
            one, slot = self.announced[number], self.segments[number].slot
            published = self.remote.publishes(one.slot, one.stamp)
            self.valid[number] = self.valid[number] and published
            self.rank.memory[slot][piece] = self.remote.memory[one.slot][piece]
        self.copied = max(end, self.copied)

    def _stick(self) -> None:
        if not self.copied:
            self._copy(self.rng.randint(0, len(self.pieces)))

    def _rest(self) -> None:
        if self.fate == "fail":
            self._end("injected")
        else:
            self._copy(len(self.pieces))
            if self.fate == "wrong":
                self._spoil()
            self._end()

    def _spoil(self) -> None:
        """Spoil one row of one segment, whose stamp stays right."""
        number = self.rng.randrange(len(self.segments))
        piece = self.rng.randint(1, self.announced[number].count)
        self.rank.memory[self.segments[number].slot][piece] = memory.SPOILED

    def _peer_is_dead(self) -> None:
        """Let the read fail, sooner or later."""
        if self.fate != "dead":
            self.fate = "dead"
            seconds = (1 - self.rng.random()) * self.rng.choice((1, 30))
            self.clock.after(seconds, self._peer_was_dead)

    def _peer_was_dead(self) -> None:
        """End the read. A new instance may be at the peer's address, with the same memory
        registered."""
        self.remote = self.place.process
        if self.remote.alive and self.rng.random() < 0.3:
            self._rest()
        else:
            self._end("the peer is dead")

    def _end(self, error: str = "") -> None:
        if self.rank.reads.get(self.action) is self:
            self.rank.read_ended(self)
            ended = self.rank.machine.read_ended, (self.action, error)
            self.rank.later("queue", 0.0, self.rank.handle, ended)
