"""Decode context parallelism (DCP) with a drafter: the target is dealt out by tokens, the drafter
cut by heads."""

from __future__ import annotations

import pytest
from rig.model import Cache, Case, Request
from rig.ring import right, run

# The prefix of one of decode's pages; chunks that end inside of them.
REQUESTS = (
    Request(23, chunk_pages=1),
    Request(8),
    Request(1),
    Request(29, prefix_pages=1, chunk_pages=3),
)


@pytest.mark.transports(2)
@pytest.mark.parametrize("prefill_tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("decode_tp", "dcp"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("hybrid", [False, True])
def test_from_a_server_without_it(
    prefill_tp: int, decode_tp: int, dcp: int, heads: int, hybrid: bool
) -> None:
    right(
        Case(
            prefill_tp, decode_tp, dcp=dcp, hybrid=hybrid, requests=REQUESTS,
            draft=Cache("mha", heads=heads, k_bytes=4, v_bytes=6), seed=heads,
        )
    )  # fmt: skip


@pytest.mark.transports(1)
@pytest.mark.parametrize(("tp", "dcp"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("hybrid", [False, True])
def test_between_equal_servers(tp: int, dcp: int, heads: int, hybrid: bool) -> None:
    right(
        Case(
            tp, tp, prefill_dcp=dcp, dcp=dcp, hybrid=hybrid, requests=REQUESTS,
            draft=Cache("mha", heads=heads),
        )
    )  # fmt: skip


def test_equal_dcp_and_unequal_tp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "3")
    outcome = run(Case(4, 2, prefill_dcp=2, dcp=2, requests=(Request(8),)))
    assert outcome.wrong == []
    assert outcome.statuses == {"failed"}
    assert "target with DCP on prefill at unequal TP" in outcome.reasons
