"""Random faults, one after the other and side by side: nothing lost, leaked or wrong."""

from __future__ import annotations

import pytest
from rig.soak import Soak, run

pytestmark = pytest.mark.transports

DIRECTIONS = [(2, 1), (1, 2)]


def clean(requests: int, seed: int, faulty: float = 0.2, max_tokens: int = 4000) -> None:
    """Nobody's server is killed here, so each request that fails has met a fault of its own."""
    soaks = [
        Soak(requests, seed, faulty, prefill_tp, decode_tp, max_tokens)
        for prefill_tp, decode_tp in DIRECTIONS
    ]
    verdicts = run(*soaks)
    assert {str(v.soak): v.problems for v in verdicts if v.problems} == {}
    assert {str(v.soak): v.others for v in verdicts if v.others} == {}
    for verdict in verdicts:
        assert verdict.counts["succeeded"] + verdict.counts["failed"] == requests
        assert verdict.counts["cold"] < verdict.counts["succeeded"] / 3
        assert verdict.counts["succeeded"] > (1 - faulty) * requests / 3


def test_short_soak() -> None:
    clean(60, seed=1, max_tokens=1000)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_soak() -> None:
    """2,000 requests of 1 to 4,000 tokens, each page used about 20 times."""
    clean(2000, seed=2)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_request_meets_a_fault() -> None:
    clean(500, seed=3, faulty=1.0)
