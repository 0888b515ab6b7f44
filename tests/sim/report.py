"""A run, for people."""

from __future__ import annotations

from tests.sim.runner import Outcome, Result, run_spec
from tests.sim.shrink import shrink


def summary(result: Result) -> str:
    each = 1000 * result.seconds / max(1, result.schedules)
    transitions = len(result.coverage.counts)
    text = f"{result.schedules} schedules, {each:.2f} ms each"
    return f"{text}, {transitions} transitions under faults" if transitions else text


def describe(outcome: Outcome, large: bool, mutation: str = "") -> str:
    """The smallest schedule that fails like this one, and its log."""
    least = run_spec(shrink(outcome).spec, logged=True)
    options = (" --large" if large else "") + (f" --mutation {mutation}" if mutation else "")
    return "\n".join(
        [
            f"{outcome.invariant}: {outcome.detail}",
            f"again: python scripts/simulate.py --replay {outcome.name}{options}",
            "the smallest schedule found that fails like it:",
            *least.spec.lines(),
            *(least.log or ()),
            f"{least.invariant}: {least.detail}",
        ]
    )
