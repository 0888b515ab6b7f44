"""The data plane: reads from a prefill rank's slots to a decode rank's, and how they go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mixkv.decode import events as ev

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.prefill import PrefillRank

FAULTS = ("fail", "fail_late", "hang", "late", "slow")


class Read:
    """`valid`: the slot was the reader's all the time. `fate`: "" where nothing goes wrong."""

    def __init__(
        self, rank: DecodeRank, action: ev.StartRead, remote: PrefillRank | None, stamp: int
    ) -> None:
        self.rank, self.remote, self.stamp = rank, remote, stamp
        self.world, self.clock, self.rng = rank.world, rank.clock, rank.rng
        self.number, self.pieces = action.read, action.tokens + 2
        self.there, self.here = action.remote_slot, action.local_slot
        self.copied = 0
        self.valid = True
        self.failed = self.given_up = False
        self.fate = rank.fate_of_read(action.peer)

    def start(self) -> None:
        rng = self.rng
        match self.fate:
            case "fail":
                self._fail(0.0)
            case "fail_late" | "hang" | "stuck":
                self._after(rng.random() * 0.01, self._stick)
            case "late":
                self._go(4.8 + rng.random() * 4)
            case "slow":
                self._go(rng.random() * 4.5)
            case _:
                self._go(rng.random() ** 4 * self.world.copying)

    def give_up(self) -> None:
        self.given_up = True
        if self.fate == "hang":
            self._after(self.rng.choice((2, 35)) * self.rng.random(), self._land)
        elif self.fate == "stuck":
            self._after(self.rank.stuck + self.rng.random(), self._land)

    # -- what goes on

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
        self._after(seconds * self.rng.random(), self._first)
        self._after(seconds, self._rest)

    def _copy(self, end: int) -> None:
        self.valid = self.valid and self.remote.offers(self.there, self.stamp)
        here, there = self.rank.memory[self.here], self.remote.memory[self.there]
        here[self.copied : end] = there[self.copied : end]
        self.copied = max(end, self.copied)

    def _first(self) -> None:
        if not self.copied:
            self._copy(self.rng.randint(1, self.pieces))

    def _rest(self) -> None:
        self._copy(self.pieces)
        self._end(ev.ReadDone(self.number))

    def _stick(self) -> None:
        self._copy(self.rng.randint(0, self.pieces - 1))
        if self.fate == "fail_late":
            self._fail(self.rng.random() * 6)

    def _land(self) -> None:
        self._copy(self.pieces)
        self._end(ev.ReadSettled(self.number))

    def _fail(self, settles: float) -> None:
        self.failed = True
        self._post(ev.ReadFailed(self.number, "injected"))
        if settles:
            self._after(settles, self._land)
        else:
            self._end(ev.ReadSettled(self.number))

    def _peer_is_dead(self) -> None:
        """The read fails, or hangs until it is given up."""
        if self.fate == "dead":
            return
        if not (self.failed or self.given_up) and self.rng.random() < 0.5:
            self.fate = "hang"
            return
        self.fate = "dead"
        if not self.failed:
            self._post(ev.ReadFailed(self.number, "the peer is dead"))
        self.clock.after(self.rng.random(), self._end, ev.ReadSettled(self.number))

    def _post(self, event: object) -> None:
        self.rank.later("queue", 0.0, self.rank.handle, event)

    def _end(self, event: object) -> None:
        if self.rank.reads.get(self.number) is self:
            self.rank.read_ended(self)
            self._post(event)
