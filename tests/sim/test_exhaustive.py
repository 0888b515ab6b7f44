"""Every order of events of one request with two readers, and what disturbs it.

Two disturbances have too many worlds for each day: by default one in so many of the worlds that a
disturbance leads to is gone on from, to the end and in every order. `--full` takes more of them,
and longer prompts.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_mixkv.decode.machine import Machine as Decode
from tests.sim.exhaustive.machine import Prefill
from tests.sim.exhaustive.search import Report, search
from tests.sim.exhaustive.values import FAULTS, Case
from tests.sim.exhaustive.world import World

ONE = Case(chunks=((0, 1),))  # one segment for each reader
TWO = Case(chunks=((0, 2),))
MORE = Case(tokens=2)  # two chunks, a segment of each
THREE = Case()


def explore(case: Case, disturbances: int, one_in: int = 1) -> Report:
    report = search(lambda: World(case), disturbances, one_in)
    print(f"{case}: {report.worlds} worlds, {report.steps} steps, {report.seconds:.0f} s")
    assert not report.violation, f"\n{report}"
    assert all(report.worlds)
    return report


@pytest.mark.parametrize(
    "case",
    [ONE, TWO._replace(slots=4, local_slots=4), MORE, MORE._replace(pending=True)],
    ids=["one", "two", "more", "pending"],
)
def test_undisturbed_requests_are_warm(case):
    explore(case, 0)


@pytest.mark.full
@pytest.mark.parametrize(("slots", "copiers"), [(2, 3), (3, 1), (4, 1)])
def test_undisturbed_requests_of_three_segments_are_warm(slots, copiers):
    explore(THREE._replace(slots=slots, local_slots=slots, copiers=copiers), 0)


def test_one_disturbance():
    explore(ONE, 1, one_in=200)


@pytest.mark.full
@pytest.mark.parametrize("pending", [False, True])
def test_one_disturbance_in_full(pending):
    explore(ONE._replace(pending=pending), 1)


@pytest.mark.full
@pytest.mark.parametrize("kind", FAULTS)
def test_one_disturbance_of_two_chunks(kind):
    explore(MORE._replace(faults=(kind,)), 1, one_in=20)


def test_two_disturbances():
    explore(ONE, 2, one_in=2000)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", FAULTS)
def test_two_disturbances_of_which_one_is_of_a_kind(kind):
    for other in FAULTS[FAULTS.index(kind) :]:  # a kind twice, too
        explore(ONE._replace(faults=(kind, other)), 2, one_in=100)


class AcknowledgesEarly(Decode):
    """When READY comes, not when the read has ended."""

    def _ready(self, peer: Any, room: Any, ready: Any) -> None:
        super()._ready(peer, room, ready)
        self._segments.acknowledge(peer, ready.segments)


class AcknowledgesDoubled(Decode):
    """A READY that comes twice at once, though the first one's read may still run."""

    def _ready(self, peer: Any, room: Any, ready: Any) -> None:
        if room is not None and room.wants and ready.segment < room.parts[peer].announced:
            self._segments.acknowledge(peer, ready.segments)
        super()._ready(peer, room, ready)


class NeverGivesUp(Prefill):
    """A room whose readers have not all opened it is never settled."""

    def _give_up(self, room: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("case", "disturbances", "mutation", "expected"),
    [
        (TWO, 0, {"decode": AcknowledgesEarly}, "used again"),
        (TWO._replace(faults=("double",)), 1, {"decode": AcknowledgesDoubled}, "used again"),
        (ONE._replace(faults=("die",)), 1, {"prefill": NeverGivesUp}, "never settles"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_mutation_is_found(case, disturbances, mutation, expected):
    report = search(lambda: World(case, **mutation), disturbances, one_in=20)
    print(report)
    assert expected in report.violation
    assert report.path


def test_a_number_that_comes_again_before_decode_is_done_with_it_is_not_covered():
    """What the protocol needs of SGLang: a request's number is not another's on prefill while an
    OPEN of the former one may still be on its way from a decode rank that waits for it."""
    report = search(lambda: World(ONE._replace(faults=("anyhow",))), 1, one_in=20)
    assert "row 0 of reader" in report.violation
