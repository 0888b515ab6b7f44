"""Without opting in, SGLang moves a drafter's KV as before: correctly for some pairs, and wrongly
for others. test_launchers.py shows that SGLang's classes are unchanged."""

from __future__ import annotations

import pytest
from rig.ring.model import Cache, Case, Request
from rig.ring.run import run


def stock(prefill_tp: int, decode_tp: int, **kwargs: object) -> Case:
    return Case(prefill_tp, decode_tp, prefill_mixkv=False, decode_mixkv=False, **kwargs)


DSA = Cache("mla", layers=4, k_bytes=24, index_k=(True, False, True, False))
OF_DSA = {"target": DSA, "page_size": 64, "requests": (Request(150, chunk_pages=1), Request(64))}
RIGHT: dict[str, Case] = {
    "equal TP": stock(2, 2),
    "heads replicated on both sides": stock(4, 2, draft=Cache("mha", heads=1)),
    "one head of two": stock(4, 2, draft=Cache("mha", heads=2)),
    "DCP at equal TP": stock(2, 2, dcp=2, requests=(Request(23, chunk_pages=1), Request(8))),
    "DCP with a hybrid target, P < D": stock(
        1, 2, dcp=2, hybrid=True, requests=(Request(23, chunk_pages=1), Request(8))
    ),
    # Index keys are the same on every rank, so the rank that sends the target also sends them.
    "DSA": stock(2, 2, **OF_DSA),
    "DSA with its MTP layer, stages": stock(
        2, 2, prefill_pp=2, draft=Cache("mla", k_bytes=24, index_k=(True,)), **OF_DSA
    ),
    "DSA without a drafter, P > D": stock(2, 1, draft=None, **OF_DSA),
    "DSA without a drafter, P < D": stock(1, 2, draft=None, **OF_DSA),
}


@pytest.mark.parametrize("name", RIGHT)
def test_stock_is_correct_for_these_pairs(name: str) -> None:
    outcome = run(RIGHT[name])
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (4, 2)])
def test_gather_is_silently_wrong(prefill_tp: int, decode_tp: int) -> None:
    """From more ranks to fewer, draft KV is wrong, and no request fails. This is the fault that the
    plugin fixes."""
    outcome = run(stock(prefill_tp, decode_tp))
    assert outcome.statuses == {"success"}
    assert outcome.wrong
    assert all("draft entry" in wrong for wrong in outcome.wrong)


def test_scatter_is_wrong_at_low_page_numbers() -> None:
    """From fewer ranks to more, draft KV is wrong. At low page numbers, the bytes go to wrong
    places inside the pool. At high page numbers, the transfer fails."""
    requests = (Request(8), Request(4))
    outcome = run(stock(1, 2, requests=requests, shuffled=False))
    assert outcome.statuses == {"success"}
    assert any("draft entry" in wrong for wrong in outcome.wrong)


def test_dcp_with_a_hybrid_target_is_silently_wrong() -> None:
    """From more ranks to fewer, one of two prefill ranks sends nothing. test_matrix.py has this
    case with the plugin."""
    outcome = run(stock(4, 2, dcp=2, hybrid=True, requests=(Request(8),)))
    assert outcome.statuses == {"success"}
    assert outcome.wrong
    assert all("draft entry" in wrong for wrong in outcome.wrong)


@pytest.mark.parametrize(
    ("backend", "hybrid"),
    [pytest.param("mooncake", False, marks=pytest.mark.full), ("nixl", True),
     pytest.param("nixl", False, marks=pytest.mark.full)],
    indirect=["backend"],
)  # fmt: skip
def test_dcp_at_unequal_tp_ends_a_thread_of_prefill(
    monkeypatch: pytest.MonkeyPatch, hybrid: bool, backend: str
) -> None:
    """Without that thread, the prefill rank serves no more requests. test_matrix.py has this case
    with the plugin."""
    monkeypatch.setattr("rig.ring.rank.LIMIT_S", 20)
    outcome = run(stock(1, 2, dcp=2, hybrid=hybrid, requests=(Request(8),)))
    assert "success" not in outcome.statuses
    if backend == "mooncake":
        assert any("has ended" in wrong for wrong in outcome.wrong)
