"""The channel's connections: ordered, and a message is lost only with its connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mixkv.channel.messages import Message, Open, decode, encode
from sglang_mixkv.decode import events as dev
from sglang_mixkv.prefill import events as pev

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.world import Place


class Link:
    """A decode rank's socket for one peer, an instance; it is connected to the peer's address.

    `connection`: how prefill names it; another one after each break. `blocked`: until then nothing
    passes, and what waits longer than TCP's time-out is lost. `silent`: nobody notices its end.
    """

    def __init__(self, reader: DecodeRank, peer: bytes, place: Place) -> None:
        self.reader, self.peer, self.place = reader, peer, place
        self.world, self.clock, self.rng = reader.world, reader.clock, reader.rng
        self.epoch = 0
        self.connection = b""
        self.blocked = 0.0
        self.slow = 0.0  # so much delay at most; until `slow_until`
        self.slow_until = 0.0
        self.doubles = 0
        self._arrivals = [0.0, 0.0]
        self._connect()

    def _connect(self) -> None:
        self.connection = b"%d" % self.world.next_number()
        self.world.connections[self.connection] = self

    # -- messages

    def to_prefill(self, message: Message) -> None:
        if not self._is_up():
            self._could_not_send()
            return
        self._carry(0, encode(message), self._arrive_at_prefill)

    def to_decode(self, message: Message) -> None:
        self._carry(1, encode(message), self._arrive_at_decode)

    def _is_up(self) -> bool:
        return self.place.process is not None and self.place.process.alive

    def _carry(self, way: int, frame: bytes, arrive: object) -> None:
        now, rng = self.clock.now, self.rng
        delay = 0.00005 + rng.random() ** 3 * 0.002
        if now < self.slow_until:
            delay += rng.random() * self.slow
        when = max(self._arrivals[way], now + delay)
        if self.blocked > now:
            when = max(when, self.blocked + delay)
        when = min(when, max(self._arrivals[way], now + self.world.times.delivery))
        self._arrivals[way] = when
        self.clock.at(when, arrive, self.epoch, frame)
        if self.doubles and rng.random() < 0.7:
            self.doubles -= 1
            self._arrivals[way] = when = when + rng.choice((0.0, 0.001, 0.02, 0.5)) * rng.random()
            self.clock.at(when, arrive, self.epoch, frame)

    def _arrive_at_prefill(self, epoch: int, frame: bytes) -> None:
        process = self.place.process
        if epoch != self.epoch or process is None or not process.alive:
            return
        message = decode(frame)
        if isinstance(message, Open):
            self.world.opens_arrived.add((process.instance, message.generation))
        event = pev.Received(self.connection, message)
        process.step(self.connection, process.handle, (event,))

    def _arrive_at_decode(self, epoch: int, frame: bytes) -> None:
        if epoch != self.epoch or not self.reader.alive:
            return
        event = dev.Received(self.peer, decode(frame))
        self.reader.step(self, self.reader.handle, (event,))

    # -- trouble

    def end(self, silent: bool = False) -> None:
        """The connection is lost, and what is on its way with it; the next one is another."""
        if not self.connection:
            return
        former, self.epoch = self.connection, self.epoch + 1
        del self.world.connections[former]
        self.connection = b""
        if self.reader.alive:
            self._connect()
        if silent:
            return
        process = self.place.process
        if process is not None and process.alive and self.rng.random() < 0.7:
            delay = self.rng.choice((0.0, 0.01, 1.0, 5.0)) * self.rng.random()
            process.later(former, delay, process.handle, pev.ConnectionLost(former))
        self._could_not_send()

    def cut(self, seconds: float) -> None:
        """Nothing passes for so long; TCP gives up within the time of delivery."""
        self.blocked = self.clock.now + seconds
        if seconds > self.world.times.delivery:
            self.clock.after(self.world.times.delivery, self.end)

    def _could_not_send(self) -> None:
        """The reader notices at once, after a while, or never."""
        chance = self.rng.random()
        if self.reader.alive and chance < 0.7:
            delay = 0.0 if chance < 0.4 else self.rng.random() * 8
            self.reader.later("lost", delay, self.reader.handle, dev.PeerLost(self.peer))
