"""The machines hold what they promise, in whole clusters on a virtual clock.

By default about a minute, with other seeds each time; they are printed. --full is the long run.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

import tests.sim.mutations  # noqa: F401
from tests.sim.cover import FAULTS, Cover, vary
from tests.sim.draw import Draw
from tests.sim.mutating import mutated
from tests.sim.report import describe, summary
from tests.sim.runner import Result, run_many, run_spec
from tests.sim.shrink import shrink

FRESH = int(time.time()) * 1000  # the first seed of today's run
FEW = 2  # servers' ranks, requests and faults that a cut-down schedule may have at most


def no_finding(result: Result, large: bool = False) -> None:
    print(summary(result))
    if result.found:
        pytest.fail(describe(result.found[0], large), pytrace=False)


def test_known_seeds_hold() -> None:
    no_finding(run_many(range(300)))


def test_known_seeds_of_large_worlds_hold() -> None:
    no_finding(run_many(range(10), large=True), large=True)


def test_other_seeds_hold_each_time() -> None:
    no_finding(run_many(range(FRESH, FRESH + 10**6), seconds=45, check_every=3))


def test_other_seeds_of_large_worlds_hold_each_time() -> None:
    no_finding(run_many(range(FRESH, FRESH + 10**5), large=True, seconds=15, check_every=3), True)


def test_each_transition_is_met_under_each_kind_of_fault() -> None:
    """On purpose: schedules that met it are taken again, with such a fault before it."""
    cover = Cover(Result(), large=False, least=1)
    cover.result = run_many(range(60), seen=cover.note)
    before, known = len(cover.missing()), len(cover.seeds)
    cover.run()
    no_finding(cover.result)
    assert known > 0
    assert len(cover.unmet) < before / 5


def test_a_schedule_of_the_cover_is_the_same_again() -> None:
    for kind in FAULTS:
        spec = vary(3, 7, kind, large=False)
        assert spec == vary(3, 7, kind, large=False)
        assert len(spec.faults) == len(Draw(3, False).spec().faults) + 1


@pytest.mark.parametrize("large", [False, True])
def test_a_seed_gives_the_same_run_again(large: bool) -> None:
    for seed in range(20 if not large else 3):
        spec = Draw(seed, large).spec()
        first, second = (run_spec(spec, logged=True).log for _ in range(2))
        assert [_without_addresses(line) for line in first] == [
            _without_addresses(line) for line in second
        ]


def _without_addresses(line: str) -> str:
    return line.partition("pages=")[0]


def test_worlds_without_faults_are_warm_or_cold_for_a_reason() -> None:
    for seed in range(200):
        spec = replace(Draw(seed, False).spec(), faults=())
        outcome = run_spec(spec)
        assert not outcome.invariant, outcome.detail
        lives = outcome.world.lives.values()
        assert all(life.begun is not None for life in lives if life.request.after < 0)


def test_a_failing_schedule_is_cut_down() -> None:
    with mutated("not_cleared"):
        found = run_many(range(100)).found[0]
        least = shrink(found)
    assert least.invariant == found.invariant
    assert len(least.spec.requests) == 1
    assert len(least.spec.faults) <= FEW
    assert len(least.spec.lines()) <= len(found.spec.lines())


def test_a_finding_is_described_with_its_events_and_how_to_run_it_again() -> None:
    with mutated("forward_not_awaited"):
        text = describe(run_many(range(100)).found[0], False, "forward_not_awaited")
    assert "--replay" in text
    assert "--mutation forward_not_awaited" in text
    assert "Unpack(" in text


# -- what the runs go through

WITHOUT_FAULTS = {
    ("prefill", "Open", "no room"), ("prefill", "Open", "unopened"),
    ("prefill", "Open", "partly opened"), ("prefill", "AddChunk", "unopened"),
    ("prefill", "ChunkWritten", "packing"), ("prefill", "Packed", "open"),
    ("prefill", "Ack", "offered"), ("prefill", "TargetSent", "settled"),
    ("prefill", "End", "settled"), ("prefill", "Begin", "early OPENs"),
    ("decode", "OpenRoom", ""), ("decode", "OpenRoom", " pending"), ("decode", "OpenRoom", "cold"),
    ("decode", "Ready", "reading"), ("decode", "Ready", "pending"),
    ("decode", "ReadDone", "reading"), ("decode", "JobDone", "unpack, done, unpacking"),
    ("decode", "TargetArrived", "decided, warm"), ("decode", "CloseRoom", "decided, warm"),
}  # fmt: skip
UNDER_FAULTS = {
    ("prefill", "Open", "another instance", "kill"), ("prefill", "Open", "known", "double"),
    ("prefill", "Open", "settled", "stop"), ("prefill", "Ack", "not offered", "stop"),
    ("prefill", "Fail", "early", "stop"), ("prefill", "Packed", "over", "kill"),
    ("prefill", "Packed", "open, error", "error"),
    ("prefill", "ConnectionLost", "open parts", "kill"),
    ("prefill", "TargetSent", "unopened", "stop"), ("decode", "PeerLost", "in use", "break"),
    ("decode", "Ready", "no room", "stop"), ("decode", "ReadFailed", "reading", "reads"),
    ("decode", "ReadDone", "closed, failed", "reads"),
    ("decode", "JobDone", "clear, done, clearing", "cut"),
    ("decode", "JobDone", "clear, error, clearing", "error"),
}  # fmt: skip


def test_the_runs_go_through_the_machines_transitions() -> None:
    result = run_many(range(5000, 6500), check_every=10)
    no_finding(result)
    pairs = result.coverage.pairs()
    assert WITHOUT_FAULTS - set(pairs) == set()
    met = {(*transition, fault) for transition, of in pairs.items() for fault in of}
    assert UNDER_FAULTS - met == set()


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_small_schedules() -> None:
    result = run_many(range(10**6, 10**6 + 10**5), check_every=5)
    no_finding(result)
    thin = {
        (*transition, fault): count
        for transition, of in result.coverage.pairs().items()
        for fault, count in of.items()
        if count < 100
    }
    print(f"{len(thin)} transitions under a fault were seen less than a hundred times")
    assert not UNDER_FAULTS & set(thin)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_ten_thousand_large_schedules() -> None:
    no_finding(run_many(range(10**6, 10**6 + 10**4), large=True, check_every=20), large=True)
