"""Each transition of the machines under each kind of fault, so many times.

What drawn schedules meet seldom is met on purpose: a schedule that went through the transition is
taken again, varied, with a fault of the kind before it. `SEED~N~KIND` names such a schedule.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import replace

from tests.sim.coverage import Coverage, Transition
from tests.sim.draw import KINDS, Draw
from tests.sim.runner import Outcome, Result, run_spec
from tests.sim.spec import Spec

FAULTS = sorted(set(KINDS))
KEPT = 12  # schedules that are remembered for each transition
TRIES = 300  # in a row that do not meet a pair, before it is given up


def vary(seed: int, number: int, kind: str, large: bool) -> Spec:
    """The schedule of this seed with one more fault, and other delays in half of the cases."""
    draw = Draw(seed, large)
    spec = draw.spec()
    draw.rng = rng = random.Random(f"{seed} {number}")
    request = rng.choice([one for one in spec.requests if not one.late])
    when = request.arrival * rng.random() if rng.random() < 0.5 else request.arrival
    when = max(0.0, when - rng.choice((0, 0.001, 0.1)) * rng.random())
    fault = draw.fault(list(spec.servers), [request], when, kind)
    faults = tuple(sorted((*spec.faults, fault), key=lambda one: one.time))
    return replace(spec, seed=seed if rng.random() < 0.5 else seed + number, faults=faults)


class Cover:
    def __init__(self, result: Result, large: bool, least: int) -> None:
        self.result, self.large, self.least = result, large, least
        self.seeds: dict[Transition, list[int]] = defaultdict(list)
        self.number = 0
        self.unmet: dict[tuple[Transition, str], int] = {}

    def note(self, seed: int, coverage: Coverage) -> None:
        for transition, _ in coverage.counts:
            kept = self.seeds[transition]
            if len(kept) < KEPT and seed not in kept:
                kept.append(seed)

    def missing(self) -> list[tuple[Transition, str]]:
        counts = self.result.coverage.counts
        pairs = [(transition, fault) for transition in self.seeds for fault in FAULTS]
        return [p for p in pairs if counts[p] < self.least and p not in self.unmet]

    def run(self) -> None:
        """Until each pair was met so often, or in vain so many times; or something was found."""
        began = time.process_time()
        while (missing := self.missing()) and not self.result.found:
            for pair in missing:
                self._meet(pair)
        self.result.seconds += time.process_time() - began

    def _meet(self, pair: tuple[Transition, str]) -> None:
        transition, kind = pair
        vain = 0
        while self.result.coverage.counts[pair] < self.least and not self.result.found:
            self.number += 1
            seeds = self.seeds[transition]
            seed = seeds[self.number % len(seeds)]
            before = self.result.coverage.counts[pair]
            self._run(seed, kind)
            vain = vain + 1 if self.result.coverage.counts[pair] == before else 0
            if vain >= TRIES:
                self.unmet[pair] = before
                return

    def _run(self, seed: int, kind: str) -> None:
        coverage = Coverage()
        outcome: Outcome = run_spec(vary(seed, self.number, kind, self.large), coverage)
        self.result.schedules += 1
        self.result.coverage.merge(coverage)
        if outcome.invariant:
            outcome.name = f"{seed}~{self.number}~{kind}"
            self.result.found.append(outcome)
