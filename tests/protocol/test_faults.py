"""Faults, each tried for real: what the request gets, and that the next one works."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from rig import channel_faults
from rig.faults import TIMEOUTS, WAITING_S, Fault, problems
from rig.model import Case, Request
from rig.rank import Rank, send
from rig.ring import run

pytestmark = pytest.mark.transports(every=14)


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's, short enough to wait for."""
    for name, seconds in TIMEOUTS.items():
        monkeypatch.setenv(name, seconds)


@pytest.mark.parametrize("fault", channel_faults.FAULTS, ids=str)
def test_fault(fault: Fault) -> None:
    outcome = run(fault.case())
    assert problems(fault, outcome) == []


# ---------------------------------------------------------------- servers that nobody restarts


def die_when_sending(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    if rank.rank == 1:
        os._exit(9)
    send(rank, sender, chunk, state)


def test_a_draft_only_sender_is_killed() -> None:
    """The target's bytes are there, the draft's never come: the request is served cold, well before
    SGLang's timeout."""
    case = Case(2, 1, requests=(Request(12),), extra={"send": die_when_sending})
    outcome = run(case)
    (decode,) = outcome.decode
    assert decode.wrong == []
    assert (decode.status, decode.cold) == (["success"], {0})
    assert decode.seconds[0] < WAITING_S


def test_a_decode_rank_is_killed_and_the_other_is_served() -> None:
    """Two DP ranks on one prefill server: the end of one is not the other's."""

    def die(rank: Rank) -> None:
        threading.Timer(0.0, os._exit, args=(9,)).start()
        time.sleep(1)

    case = Case(
        2, 1, decode_dp=2, requests=(Request(8), Request(8), Request(12)),
        extra={"faults": {("decode", 0): die}},
    )  # fmt: skip
    outcome = run(case)
    assert outcome.decode[1].status == ["success"]
    assert outcome.decode[1].wrong == []
