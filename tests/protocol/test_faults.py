"""Faults, each tried for real: what the request gets, and that the next one works."""

from __future__ import annotations

import os
import threading
import time

import pytest
from rig.faults import FAULTS, TIMEOUTS, Fault, problems
from rig.model import Case, Request
from rig.rank import Rank
from rig.ring import run
from rig.special import Special

pytestmark = pytest.mark.transports(1)


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's, short enough to wait for."""
    for name, seconds in TIMEOUTS.items():
        monkeypatch.setenv(name, seconds)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault(fault: Fault) -> None:
    assert problems(fault, run(fault.case())) == []


# ---------------------------------------------------------------- servers that nobody restarts


def test_a_decode_rank_is_killed_and_the_other_is_served() -> None:
    """Two DP ranks on one prefill server: the end of one is not the other's."""

    def die(rank: Rank) -> None:
        threading.Timer(0.0, os._exit, args=(9,)).start()
        time.sleep(1)

    case = Case(
        2, 1, decode_dp=2, requests=(Request(8), Request(8), Request(12)),
        special=Special(faults={("decode", 0): die}),
    )  # fmt: skip
    outcome = run(case)
    assert outcome.decode[1].status == ["success"]
    assert outcome.decode[1].wrong == []
