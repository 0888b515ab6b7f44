"""The connections between processes, and the reads of the data plane.

A connection delivers its messages in order, and loses messages only when it breaks. A read covers
several slots and completes or fails as a whole. Its bytes may land at any time before its end, but
not afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mixkv.channel.loop import Call
from sglang_mixkv.channel.messages import Message, Ready, decode
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode.transfer import instance_of
from tests.sim import memory

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.world import Place


class Link:
    """A decode rank's socket for one peer, which is one instance at the peer's address.

    `connection`: prefill's identity of the connection, new after each break. `blocked`: the time
    until which no message passes; messages that wait longer than TCP's time-out are lost. `closed`:
    whether the decode rank has dropped the link.
    """

    def __init__(self, reader: DecodeRank, peer: bytes) -> None:
        self.reader, self.peer = reader, peer
        self.world, self.clock, self.rng = reader.world, reader.clock, reader.rng
        self.instance = instance_of(peer)
        self.place: Place = self.world.place_of[self.instance]
        self.epoch = 0
        self.names: dict[int, bytes] = {}  # identities of its connections, by epoch
        self.connection = b""
        self.blocked = 0.0
        self.slow = 0.0  # the maximum extra delay, until `slow_until`
        self.slow_until = 0.0
        self.doubles = 0
        self.closed = False
        self.overtaken: dict[int, float] = {}  # delay in seconds of an epoch's last messages
        self.heard: list[Ready] = []  # READYs of a rank that also sends false ones
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
        """Send a frame. Return whether the socket accepted it."""
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
        try:
            message = decode(frame)
        except ValueError:  # the other side drops and counts a message with an invalid number
            return
        if epoch != self.epoch:
            self._arrive_late(way, epoch, message)
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

    def _arrive_late(self, way: str, epoch: int, message: Message) -> None:
        """Deliver a message of a former connection to prefill, after those of later ones."""
        if way == "prefill" and epoch in self.overtaken:
            former, process = self.names[epoch], self.place.process
            received = process.machine.received, (former, message)
            delay = self.rng.random() * self.overtaken[epoch]
            process.later(former, delay, process.handle, received)

    # -- trouble

    def end(self, silent: bool = False) -> None:
        """Break the connection, lose the messages in flight, and connect again.

        `silent`: whether neither side notices at once.
        """
        if not self.connection:
            return
        former, self.epoch = self.connection, self.epoch + 1
        del self.world.connections[former]
        self.connection = b""
        if self.reader.alive and not self.closed:
            self._connect()
        times, rng, now = self.place.times, self.rng, self.clock.now
        if silent:  # the break is noticed later, by TCP keepalive
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
        """Block all messages for some seconds. TCP gives up after `Times.delivery`."""
        self.blocked = self.clock.now + seconds
        if seconds > self.place.times.delivery:
            self.clock.after(self.place.times.delivery, self.end)

    def _leaves(self) -> bool:
        """Return whether a lost message appears to be sent.

        The reader notices the lost connection immediately, later or never.
        """
        chance, reader = self.rng.random(), self.reader
        if reader.alive and 0.4 <= chance < 0.7:
            reader.later("lost", self.rng.random() * 8, reader.handle, self._lost())
        return chance >= 0.4 or not reader.alive

    def _lost(self) -> Call:
        return self.reader.machine.peer_lost, (self.peer,)


READ_FAULTS = ("fail", "hang", "late", "slow", "wrong")


class Read:
    """A read of the data plane.

    `valid`: for each segment, whether its remote slot was published during the whole read. `fate`:
    the fault that hits the read, or "".
    """

    def __init__(self, rank: DecodeRank, action: dact.StartRead) -> None:
        self.rank, self.action, self.segments = rank, action, action.segments
        self.announced = [one.announced for one in self.segments]
        instance = instance_of(action.peer)
        self.place = place = rank.world.place_of[instance]
        self.remote = place.process if place.process.instance == instance else None
        self.peer = action.peer
        self.world, self.clock, self.rng = rank.world, rank.clock, rank.rng
        # a false READY may announce 2^30 tokens
        sizes = [min(one.count, memory.TOKENS) + 2 for one in self.announced]
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
        """Run a step. A copy over TCP needs both processes to run, a copy over RDMA neither."""
        if not self.rank.alive:
            return
        remote = self.remote
        if remote is None or not remote.alive or self.rank.is_restored or remote.is_restored:
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
        """Corrupt one row of one segment, but not the segment's stamp."""
        number = self.rng.randrange(len(self.segments))
        piece = self.rng.randint(1, self.announced[number].count)
        self.rank.memory[self.segments[number].slot][piece] = memory.SPOILED

    def _peer_is_dead(self) -> None:
        """Schedule the failure of the read, soon or much later.

        The process may also have been restored from a snapshot, so that its data plane is dead.
        """
        if self.fate != "dead":
            self.fate = "dead"
            seconds = (1 - self.rng.random()) * self.rng.choice((1, 30))
            self.clock.after(seconds, self._peer_was_dead)

    def _peer_was_dead(self) -> None:
        """End the read, which a new instance with the same registered memory may have served."""
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
