"""Exhaustive search around the simplest schedule of a request with two readers.

By default, the tests try all schedules with one deviation and some of those with two. `--full`
tries more.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_mixkv.decode.machine import Machine as Decode
from sglang_mixkv.prefill.machine import Machine as Prefill
from tests.sim.every import PREFILL, READER, search, small
from tests.sim.faults import Break, Cut, Double, Fault, Kill

ONE, MORE, PENDING = small(1), small(1, 1), small(1, 1, pending=True)
LONG, AGAIN = small(2, 1, slots=3), small(1, again=True)  # `again` reuses the room number
CASES = pytest.mark.parametrize(
    "spec", [ONE, MORE, PENDING, LONG, AGAIN], ids=["one", "more", "pending", "long", "again"]
)


def explore(spec: Any, late: int, befall: int, one_in: int, **more: Any) -> None:
    report = search(spec, late, befall, one_in=one_in, **more)
    print(f"{report.runs} runs")
    if (run := report.failed) is not None:
        pytest.fail("\n".join([*spec.lines(), *run.log, f"{run.way}: {run.finding}"]), False)


@CASES
def test_one_late_step(spec: Any) -> None:
    explore(spec, 1, 0, 1)


@CASES
def test_one_fault(spec: Any) -> None:
    explore(spec, 0, 1, 7)


def test_two_late_steps() -> None:
    explore(ONE, 2, 0, 4)


def test_a_fault_and_a_late_step() -> None:
    explore(ONE, 1, 1, 400)


def test_a_restart_and_a_broken_connection() -> None:
    """A room that reads from the slots of a new instance goes cold."""
    kinds = Kill(0, PREFILL, 0.1), Break(0, READER, 0.0, PREFILL)
    explore(MORE, 0, 2, 30, kinds=kinds)


@pytest.mark.full
@pytest.mark.timeout(7200)
@CASES
@pytest.mark.parametrize(("late", "befall", "one_in"), [(2, 0, 1), (1, 1, 10), (0, 2, 500)])
def test_more_schedules_with_two_deviations(spec: Any, late: int, befall: int, one_in: int) -> None:
    explore(spec, late, befall, one_in)


def small_ones(kind: type[Fault]) -> tuple[Fault, ...]:
    return tuple(kind.small(PREFILL, READER))


def test_search_finds_a_defect_with_duplicate_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search finds a defect that acknowledges a duplicate of a READY that is being read."""
    whole = Decode.ready

    def acknowledge(self: Any, peer: Any, ready: Any) -> None:
        request = self._requests.get(ready.generation)
        one = request.transfers[peer] if request is not None and request.wants else None
        if one is not None and ready.segment < one.announced:
            self._segments.acknowledge(peer, ready.segments)
        whole(self, peer, ready)

    monkeypatch.setattr(Decode, "ready", acknowledge)
    assert search(ONE, 1).failed is None
    assert "still reads" in search(ONE, 0, 1, small_ones(Double)).failed.finding


def test_search_finds_a_defect_with_lost_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search finds a defect that never releases a room which some reader did not open."""
    monkeypatch.setattr(Prefill, "_give_up", lambda self, request: None)
    assert search(ONE, 0).failed is None
    assert search(ONE, 0, 1, small_ones(Cut)).failed is not None
