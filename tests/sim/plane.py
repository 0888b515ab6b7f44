"""The data plane: reads from a prefill rank's slots to a decode rank's, and how they go wrong.

A read is of several slots, and ends as a whole. Bytes may land until it has ended, however long
that takes, and none afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mixkv.decode import events as ev

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.prefill import PrefillRank

FAULTS = ("fail", "hang", "late", "slow")


class Read:
    """`valid`: the remote slot was the reader's all the time, by range. `fate`: "" where nothing
    goes wrong."""

    def __init__(
        self, rank: DecodeRank, action: ev.StartRead, remote: PrefillRank | None, stamps: list[int]
    ) -> None:
        self.rank, self.remote, self.stamps = rank, remote, stamps
        self.world, self.clock, self.rng = rank.world, rank.clock, rank.rng
        self.number, self.ranges = action.read, action.ranges
        self.pieces = [(n, i) for n, one in enumerate(self.ranges) for i in range(one.tokens + 2)]
        self.rng.shuffle(self.pieces)
        self.copied = 0
        self.valid = [True] * len(self.ranges)
        self.fate = rank.fate_of_read(action.peer)

    def start(self) -> None:
        rng, late = self.rng, self.rank.place.times.read
        match self.fate:
            case "fail":
                self._after(rng.random() * 0.01, self._stick)
                self._after(0.01 + rng.random() * rng.choice((0.01, 2)), self._fail)
            case "hang":
                self._go(late + rng.choice((2, 35)) * rng.random())
            case "stuck":
                self._go(late + self.rank.stuck + rng.random())
            case "late":
                self._go(late - 0.2 + rng.random() * 4)
            case "slow":
                self._go(rng.random() * (late - 0.5))
            case _:
                self._go(rng.random() ** 4 * self.world.copying)

    def _after(self, delay: float, call: object) -> None:
        self.clock.after(delay, self._step, call)

    def _step(self, call: object) -> None:
        """Over TCP both processes have a part in each copy; RDMA needs neither."""
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

    def _go(self, seconds: float) -> None:
        self._after(min(seconds * self.rng.random(), 0.02), self._stick)
        self._after(seconds, self._rest)

    def _copy(self, end: int) -> None:
        for number, piece in self.pieces[self.copied : end]:
            one = self.ranges[number]
            offered = self.remote.offers(one.remote_slot, self.stamps[number])
            self.valid[number] = self.valid[number] and offered
            there = self.remote.memory[one.remote_slot]
            self.rank.memory[one.local_slot][piece] = there[piece]
        self.copied = max(end, self.copied)

    def _stick(self) -> None:
        if not self.copied:
            self._copy(self.rng.randint(0, len(self.pieces)))

    def _rest(self) -> None:
        self._copy(len(self.pieces))
        self._end()

    def _fail(self) -> None:
        self._end("injected")

    def _peer_is_dead(self) -> None:
        """The read fails, sooner or later."""
        if self.fate != "dead":
            self.fate = "dead"
            seconds = self.rng.random() * self.rng.choice((1, 30))
            self.clock.after(seconds, self._end, "the peer is dead")

    def _end(self, error: str = "") -> None:
        if self.rank.reads.get(self.number) is self:
            self.rank.read_ended(self)
            event = ev.ReadEnded(self.number, error)
            self.rank.later("queue", 0.0, self.rank.handle, event)
