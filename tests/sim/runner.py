"""Runs many schedules, replays one with its log, and shrinks one that fails."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from tests.sim.draw import Draw
from tests.sim.finding import Finding
from tests.sim.spec import Request, Spec
from tests.sim.world import Life, World


@dataclass
class Outcome:
    """The outcome of a schedule.

    `invariant`: the broken invariant, or "". `seen`: counts of the scenes that occurred.
    """

    spec: Spec
    invariant: str = ""
    detail: str = ""
    log: list[str] | None = None
    seen: Counter[Hashable] = field(default_factory=Counter)


def run_spec(spec: Spec, logged: bool = False) -> Outcome:
    log: list[str] | None = [] if logged else None
    outcome = Outcome(spec, log=log)
    level = logging.root.manager.disable
    logging.disable()  # injected faults would fill the log
    try:
        world = World(spec, log)
        outcome.seen = world.seen
        world.run()
        _compare(world)
    except Finding as finding:
        outcome.invariant, outcome.detail = finding.invariant, finding.detail
    except Exception as error:
        outcome.invariant = f"crash {type(error).__name__}"
        outcome.detail = traceback.format_exc(limit=-4)
    finally:
        logging.disable(level)
    return outcome


def _compare(world: World) -> None:
    """Check that a request without a fault takes at most twice its time in a run without faults.

    The limit is 0.1 s higher, and higher still if passes of the channel thread take time or if dead
    ranks leave the request one slot at a time. The run without faults is skipped if SGLang alone
    explains the time that the request took.
    """
    spec = world.spec
    slack = {life: 0.1 * (1 + spec.gathers) + _one_by_one(spec, life) for life in world.untouched}
    suspects = [life for life, more in slack.items() if life.took > more + 2 * _least(life.request)]
    if not (suspects and spec.faults):
        return
    calm = World(replace(spec, faults=()))
    calm.run()
    for life in suspects:
        without = calm.lives[life.request.id]
        if without.outcome and life.took > slack[life] + 2 * without.took:
            times = f"{life.took:.3f} s, without faults {without.took:.3f} s"
            raise Finding("slow", f"request {life.request.id} takes {times}")


def _one_by_one(spec: Spec, life: Life) -> float:
    """Return how long a request's segments take if they are moved one after another."""
    request = life.request
    own = [spec.servers[number] for number in (request.prefill, request.decode)]
    segments = request.prompt // min(server.tokens for server in own) + len(request.chunks)
    dead = any(fault.holds_slots for fault in spec.faults)
    return segments * 2 * (spec.copying + 0.005) * dead


def _least(request: Request) -> float:
    forwards = sum(chunk.seconds for chunk in request.chunks)
    return max(request.prefill_delay, request.decode_delay) + forwards + request.target


@dataclass
class Result:
    schedules: int = 0
    seconds: float = 0.0
    failed: Outcome | None = None
    seen: Counter[Hashable] = field(default_factory=Counter)


def run_many(seeds: Iterable[int], seconds: float = 1e9) -> Result:
    """Run schedules until the seeds or seconds run out, or one fails."""
    result, began = Result(), time.process_time()
    deadline = time.monotonic() + seconds
    for seed in seeds:
        outcome = run_spec(Draw(seed).spec())
        result.schedules += 1
        result.seen += outcome.seen
        if outcome.invariant:
            result.failed = outcome
        if result.failed or time.monotonic() > deadline:
            break
    result.seconds = time.process_time() - began
    return result


# `shrink` removes requests and faults from a schedule as long as it still fails.
TRIES = 3  # orders of events to try for each smaller schedule
MOST = 600  # runs in all
LINES = 1000  # last lines of the log to print


def shrink(outcome: Outcome) -> Outcome:
    """Return the smallest schedule found that breaks the same invariant."""
    runs, smaller = 0, iter(_smaller(outcome.spec))
    while (candidate := next(smaller, None)) is not None and runs < MOST:
        for shift in range(TRIES):
            runs += 1
            tried = run_spec(replace(candidate, seed=candidate.seed + shift))
            if tried.invariant == outcome.invariant:
                outcome, smaller = tried, iter(_smaller(tried.spec))
                break
    return outcome


def _smaller(spec: Spec) -> Iterator[Spec]:
    for gone in spec.requests:
        rest = [one for one in spec.requests if one is not gone]
        rest = [replace(one, after=-1) if one.after == gone.id else one for one in rest]
        yield replace(spec, requests=tuple(rest))
    for gone in spec.faults:
        yield replace(spec, faults=tuple(one for one in spec.faults if one is not gone))


def summary(result: Result) -> str:
    each = 1000 * result.seconds / max(1, result.schedules)
    return f"{result.schedules} schedules, {each:.2f} ms each"


def describe(outcome: Outcome) -> str:
    """Describe the smallest schedule that breaks the same invariant, with its log."""
    least = run_spec(shrink(outcome).spec, logged=True)
    return "\n".join(
        [
            f"{outcome.invariant}: {outcome.detail}",
            f"again: python scripts/simulate.py --replay {outcome.spec.seed}",
            "the smallest schedule found that breaks the same invariant:",
            *least.spec.lines(),
            *(least.log or ())[-LINES:],
            f"{least.invariant}: {least.detail}",
        ]
    )
