"""Whether a prefill server's warm requests accept what they should: finished requests in, a
verdict out, without I/O.

Draft KV that arrived wrong shows in the accept length alone, and so do harder prompts. Servers get
other prompts, so each is compared with itself, by its last WINDOW x BATCH warm requests:

    past   they accept FALL less than its warm requests before
    cold   they accept no more than its cold requests, whose drafters had zeros

Each request counts once, by the logarithm of its accept length: a few long ones decide nothing, and
a fall is a share. The test is Student's t of two samples, on means of BATCH requests in a row, so
that prompts which are alike because they came together count in the variance. Variance is the
past's: that of a window of two kinds of requests would hide them. Each full batch is a look.
LEVEL is that of one look: however looks depend on each other, one in 1 / LEVEL fires by chance
(Bonferroni), that is one in 16 million requests of a server. Likeness over more than a batch makes
it more.

A suspect stays one until its accept length is back, or FORGET_S later: then what it does is its
past.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

BATCH, WINDOW = 16, 12
FALL = 0.2
GAIN = 0.05  # what warm requests have to accept more than cold ones
LEVEL = 1e-6
MEMORY = 128  # batches that a running sample weighs, the newer ones more
FORGET_S = 86400.0
BOUND = -NormalDist().inv_cdf(LEVEL)


@dataclass(frozen=True)
class Yardstick:
    """Shares of its accept length: a window below `tested` by the test, and below `alarm`, is
    suspect until it is above `clear`. `fewest`: batches that it takes."""

    name: str
    tested: float
    alarm: float
    clear: float
    fewest: int


PAST = Yardstick("past", 1.0, 1 - FALL, 1 - FALL / 2, 32)
COLD = Yardstick("cold", 1 + GAIN, 1 + GAIN, 1 + 2 * GAIN, 16)


@dataclass(frozen=True)
class Finding:
    """A server that is suspect from now on. `found`, `expected`: accept lengths, as geometric
    means of requests."""

    prefill: str
    against: str
    found: float
    expected: float


def normal(t: float, freedom: int) -> float:
    """The normal deviate of the same probability as this t (Wallace's approximation)."""
    z = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(z, t)


class Sample(NamedTuple):
    """Of batches, `number` of them. `variance`: theirs, not their mean's."""

    mean: float
    variance: float
    number: int


class _Running:
    """The sample of all batches, or of about the last MEMORY."""

    def __init__(self) -> None:
        self._mean = self._spread = 0.0
        self._number = 0

    def add(self, batch: float) -> None:
        self._number = min(self._number + 1, MEMORY)
        weight, difference = 1 / self._number, batch - self._mean
        self._mean += weight * difference
        self._spread = (1 - weight) * (self._spread + weight * difference**2)

    @property
    def sample(self) -> Sample:
        number = self._number
        return Sample(self._mean, self._spread * number / max(1, number - 1), number)


class _Server:
    """`was`: names of what an earlier one at this address was judged by."""

    def __init__(self, was: Iterable[str] = ()) -> None:
        self._was = frozenset(was)
        self._begun: dict[str, list[float]] = {"warm": [], "cold": []}
        self._window: deque[float] = deque()
        self._known = {PAST: _Running(), COLD: _Running()}
        self._since: dict[Yardstick, float] = {}

    def add(self, state: str, length: float, now: float) -> Iterator[tuple[Yardstick, float]]:
        """By what it is suspect from now on, and the accept length that was expected."""
        begun = self._begun[state]
        begun.append(math.log(length))
        if len(begun) < BATCH:
            return
        batch, self._begun[state] = fmean(begun), []
        if state == "cold":
            self._known[COLD].add(batch)
            return
        self._window.append(batch)
        if len(self._window) > WINDOW:
            left = self._window.popleft()
            if PAST not in self._since:
                self._known[PAST].add(left)
        yield from self._look(now)

    def _look(self, now: float) -> Iterator[tuple[Yardstick, float]]:
        for yardstick, expected in self._judged():
            share = math.exp(fmean(self._window) - expected.mean)
            if yardstick in self._since:
                if share > yardstick.clear:
                    del self._since[yardstick]
            elif share < yardstick.alarm and self._z(yardstick, expected) > BOUND:
                self._since[yardstick] = now
                yield yardstick, math.exp(expected.mean)

    def _z(self, yardstick: Yardstick, expected: Sample) -> float:
        """How surely the window is below `tested`."""
        past = self._known[PAST].sample
        difference = expected.mean + math.log(yardstick.tested) - fmean(self._window)
        error = math.sqrt(past.variance / WINDOW + expected.variance / expected.number)
        if not error:
            return math.copysign(math.inf, difference) if difference else 0.0
        return normal(difference / error, min(past.number, expected.number) - 1)

    def _judged(self) -> Iterator[tuple[Yardstick, Sample]]:
        """By what there is enough to judge it, and the sample of that."""
        if self._known[PAST].sample.number < PAST.fewest:
            return
        for yardstick, running in self._known.items():
            if (sample := running.sample).number >= yardstick.fewest:
                yield yardstick, sample

    @property
    def length(self) -> float:
        return math.exp(fmean(self._window))

    def verdicts(self, now: float) -> Iterator[tuple[str, bool]]:
        judged = {one.name: one in self._since for one, _ in self._judged()}
        for name in {*judged, *self._was}:
            yield name, judged.get(name, False) and not self.is_forgotten(now)

    def is_forgotten(self, now: float) -> bool:
        return any(now - since > FORGET_S for since in self._since.values())


class Health:
    """Of the prefill servers that one decode rank reads from; its caller bounds how many."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}

    def add(self, prefill: str, state: str, length: float, now: float) -> list[Finding]:
        """A request has ended, `warm` or `cold`, with this accept length, 1 or more. `now`:
        seconds. What is found with it."""
        server = self._servers.get(prefill) or _Server()
        if server.is_forgotten(now):
            server = _Server(name for name, _ in server.verdicts(now))
        self._servers[prefill] = server
        found = server.add(state, length, now)
        return [Finding(prefill, by.name, server.length, expected) for by, expected in found]

    def verdicts(self, now: float) -> Iterator[tuple[str, str, bool]]:
        """Prefill server, yardstick, and whether it is suspect; where there is, or was, enough to
        judge."""
        for prefill, server in self._servers.items():
            for against, suspect in server.verdicts(now):
                yield prefill, against, suspect
