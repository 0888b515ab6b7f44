"""Decode context parallelism (DCP) with a drafter: the target is dealt out by tokens, the drafter
cut by heads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from rig.model import Cache, Case, Request, draft_bytes
from rig.ring import Outcome, run

# The prefix of one of decode's pages; chunks that end inside of them.
REQUESTS = (
    Request(23, chunk_pages=1),
    Request(8),
    Request(1),
    Request(29, prefix_pages=1, chunk_pages=3),
)


def right(case: Case) -> Outcome:
    """Every byte in its place, and none sent for nothing."""
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    sent = outcome.total("sent_bytes_total")
    assert sent == outcome.total("needed_bytes_total") == draft_bytes(case)
    assert outcome.total("rooms_total", "warm") == case.decode_tp * len(case.requests)
    return outcome


SIZES = [(d, n) for d, n in itertools.product((2, 4, 8), (2, 4, 8)) if d % n == 0]
FROM_ONE = [
    (p, d, n, heads, hybrid)
    for (d, n), p, heads, hybrid in itertools.product(SIZES, (1, 2, 4, 8), (1, 4, 8), (0, 1))
]
EQUAL = [
    (d, n, heads, hybrid) for (d, n), heads, hybrid in itertools.product(SIZES, (1, 4, 8), (0, 1))
]
# By default: each way of the heads, each N, pure and hybrid.
SAMPLE = {
    (2, 2, 2, 4, 0), (1, 2, 2, 4, 0), (4, 2, 2, 4, 1), (2, 4, 4, 8, 1), (8, 2, 2, 1, 0),
    (1, 8, 8, 4, 1), (2, 2, 2, 1), (4, 4, 4, 0),
}  # fmt: skip


def sampled(cases: list[tuple[int, ...]]) -> list[Any]:
    full = pytest.mark.full
    return [pytest.param(*c, marks=() if c in SAMPLE else full) for c in cases]


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "dcp", "heads", "hybrid"), sampled(FROM_ONE))
def test_from_a_server_without_it(
    prefill_tp: int, decode_tp: int, dcp: int, heads: int, hybrid: int
) -> None:
    right(
        Case(
            prefill_tp, decode_tp, dcp=dcp, hybrid=bool(hybrid), requests=REQUESTS,
            draft=Cache("mha", heads=heads, k_bytes=4, v_bytes=6), seed=heads,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("tp", "dcp", "heads", "hybrid"), sampled(EQUAL))
def test_between_equal_servers(tp: int, dcp: int, heads: int, hybrid: int) -> None:
    right(
        Case(
            tp, tp, prefill_dcp=dcp, dcp=dcp, hybrid=bool(hybrid), requests=REQUESTS,
            draft=Cache("mha", heads=heads),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "prefill_dcp", "dcp", "heads"),
    [(1, 2, 1, 2, 4), (4, 2, 1, 2, 8), (2, 4, 1, 4, 1), (2, 2, 2, 2, 4)],
)
@pytest.mark.parametrize("hybrid", [False, pytest.param(True, marks=pytest.mark.full)])
def test_over_nixl(
    prefill_tp: int, decode_tp: int, prefill_dcp: int, dcp: int, heads: int, hybrid: bool
) -> None:
    right(
        Case(
            prefill_tp, decode_tp, prefill_dcp=prefill_dcp, dcp=dcp, hybrid=hybrid,
            draft=Cache("mha", heads=heads), requests=REQUESTS, backend="nixl",
        )
    )  # fmt: skip


def test_equal_dcp_and_unequal_tp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "3")
    outcome = run(Case(4, 2, prefill_dcp=2, dcp=2, requests=(Request(8),)))
    assert outcome.wrong == []
    assert outcome.statuses == {"failed"}
    assert "target with DCP on prefill at unequal TP" in outcome.reasons
