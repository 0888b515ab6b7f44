"""Exhaustive search over the schedules of a small world with a few late steps or faults.

A world draws each of its delays and choices. Here each draw is 0, so that all events happen in the
order in which they were scheduled. A *deviation* is one draw that is not 0, which delays one event
behind others, or one fault between two calls of the clock. The search tries all sets of a given
number of deviations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tests.sim.faults import KINDS, Fault
from tests.sim.finding import Finding
from tests.sim.spec import Chunk, Request, Server, Spec
from tests.sim.world import LIMIT, World

PREFILL, READER = (0, 0), (1, 0)


def small(*chunks: int, pending: bool = False, again: bool = False, slots: int = 2) -> Spec:
    """Make a spec with one prefill rank and two readers of one head each.

    A segment is one token. `again`: a second request reuses the room number.
    """
    servers = (Server(0, "prefill", 1, slots, 1, 1), Server(1, "decode", 2, slots, 1, 1))
    parts = tuple(Chunk(one, pending, 0.001) for one in chunks)
    first = Request(0, 1000, 0, 1, 0.0, sum(chunks), 0, parts, forward=0.005 * pending)
    requests = (first, replace(first, id=1, after=0)) if again else (first,)
    return Spec(0, 2, servers, requests, (), False, copiers=3)


FAULTS = tuple(one for kind in KINDS for one in kind.small(PREFILL, READER))


class Decisions(random.Random):
    """A random generator that returns 0, except for the draws whose indices are in `late`."""

    def __init__(self, late: tuple[int, ...]) -> None:
        super().__init__(0)
        self._late, self.drawn = late, 0

    def random(self) -> float:
        self.drawn += 1
        return 0.999 * (self.drawn - 1 in self._late)

    def getrandbits(self, k: int) -> int:
        return int(self.random() * (1 << k))


class Way(NamedTuple):
    """One combination of deviations.

    `late`: the indices of the draws that are not 0. `faults`: pairs of a number of clock calls and
    the fault that begins after them.
    """

    late: tuple[int, ...] = ()
    faults: tuple[tuple[int, Fault], ...] = ()


class Run:
    """Runs a world with the deviations of a way. `finding`: the broken invariant, or ""."""

    def __init__(self, spec: Spec, way: Way, logged: bool = False) -> None:
        self.way, self.log, self.finding = way, [] if logged else None, ""
        rng = Decisions(way.late)
        world = World(spec, self.log, rng=rng)
        world.spec = replace(spec, faults=tuple(fault for _, fault in way.faults))
        try:
            for calls, fault in way.faults:
                world.clock.run(LIMIT, calls - world.clock.calls)
                world.befall(fault)
            world.run()
        except Finding as finding:
            self.finding = str(finding)
        self.drawn, self.calls = rng.drawn, world.clock.calls

    def further(self, late: int, befall: int, kinds: tuple[Fault, ...]) -> Iterator[Way]:
        """Yield the ways with one more deviation, later than all deviations of this way."""
        way = self.way
        if len(way.faults) < befall and not way.late:
            for calls in range(way.faults[-1][0] if way.faults else 0, self.calls):
                for fault in kinds:
                    yield way._replace(faults=(*way.faults, (calls, fault)))
        if len(way.late) < late:
            for number in range(way.late[-1] + 1 if way.late else 0, self.drawn):
                yield way._replace(late=(*way.late, number))


class Report(NamedTuple):
    runs: int
    failed: Run | None = None


def search(
    spec: Spec, late: int, befall: int = 0, kinds: tuple[Fault, ...] = FAULTS, one_in: int = 1
) -> Report:
    """Run the world in all ways with up to `late` late draws and `befall` faults.

    `one_in`: try only a random share, 1 / `one_in`, of the ways with the full number of both.
    """
    chosen, runs = random.Random(0), 0
    todo = [Way()]
    while todo:
        run = Run(spec, todo.pop())
        runs += 1
        if run.finding:
            return Report(runs, Run(spec, run.way, logged=True))
        for way in run.further(late, befall, kinds):
            is_whole = len(way.late) + len(way.faults) == late + befall
            if not is_whole or chosen.random() * one_in < 1:
                todo.append(way)
    return Report(runs)
