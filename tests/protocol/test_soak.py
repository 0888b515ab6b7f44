"""Random faults, one after the other and side by side: nothing lost, leaked or wrong.

Of requests, some are aborted, at any moment and by either side. Beside that copies and reads fail,
and messages come twice or not at all: of these troubles no request may fail.
"""

from __future__ import annotations

import pytest
from rig.traffic import Traffic, judge, run_beside

pytestmark = pytest.mark.transports

DIRECTIONS = [(2, 1), (1, 2)]
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "25",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
    "SGLANG_MIXKV_PATIENCE": "3",
}


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TIMEOUTS.items():
        monkeypatch.setenv(name, value)


def clean(requests: int, seed: int, faulty: float = 0.2, max_tokens: int = 4000) -> None:
    """Nobody's server is killed here, so each request that fails has met a fault of its own."""
    several = [
        Traffic(
            requests, tail=requests, at_once=16, prefill_tp=prefill_tp, decode_tp=decode_tp,
            max_tokens=max_tokens, faulty=faulty, seed=seed,
        )
        for prefill_tp, decode_tp in DIRECTIONS
    ]  # fmt: skip
    for problems, counts in map(judge, run_beside(*several)):
        assert problems == []
        assert counts["cold"] < counts["succeeded"] / 3
        assert counts["succeeded"] > (1 - faulty) * requests / 3


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
