"""Random faults, one after the other and side by side: nothing lost, leaked or wrong."""

from __future__ import annotations

import pytest
from rig.soak import Soak, run

pytestmark = pytest.mark.transports(every=1)

DIRECTIONS = [(2, 1), (1, 2)]


def clean(soak: Soak) -> None:
    """Nobody's server is killed here, so each request that fails has met a fault of its own."""
    verdict = run(soak)
    assert verdict.problems == []
    assert verdict.others == {}
    assert verdict.counts["succeeded"] + verdict.counts["failed"] == soak.requests
    assert verdict.counts["succeeded"] > (1 - soak.faulty) * soak.requests / 3


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), DIRECTIONS)
def test_short_soak(prefill_tp: int, decode_tp: int) -> None:
    clean(Soak(60, seed=1, prefill_tp=prefill_tp, decode_tp=decode_tp, max_tokens=1000))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), DIRECTIONS)
def test_soak(prefill_tp: int, decode_tp: int) -> None:
    """2,000 requests of 1 to 4,000 tokens, each page used about 20 times."""
    clean(Soak(2000, seed=2, prefill_tp=prefill_tp, decode_tp=decode_tp))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), DIRECTIONS)
def test_every_request_meets_a_fault(prefill_tp: int, decode_tp: int) -> None:
    clean(Soak(1000, seed=3, faulty=1.0, prefill_tp=prefill_tp, decode_tp=decode_tp))
