"""A run, for people and for programs."""

from __future__ import annotations

from tests.sim.runner import Outcome, Result, run_spec
from tests.sim.shrink import shrink


def summary(result: Result) -> dict:
    pairs = result.coverage.pairs()
    thin = [(transition, fault) for transition, of in pairs.items() for fault in of
            if of[fault] < 100]  # fmt: skip
    return {
        "schedules": result.schedules,
        "seconds": round(result.seconds, 2),
        "ms_per_schedule": round(1000 * result.seconds / max(1, result.schedules), 2),
        "findings": [[o.name, o.invariant, o.detail] for o in result.found],
        "transitions": len(pairs),
        "pairs": sum(map(len, pairs.values())),
        "pairs_below_100": len(thin),
    }


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
