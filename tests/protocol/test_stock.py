"""Not opted in, SGLang is as it was: its own right and wrong bytes. That its classes are its own:
test_launchers.py."""

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
    # Index keys are the same on every rank: they come from the one that sends the target.
    "DSA": stock(2, 2, **OF_DSA),
    "DSA with its MTP layer, stages": stock(
        2, 2, prefill_pp=2, draft=Cache("mla", k_bytes=24, index_k=(True,)), **OF_DSA
    ),
    "DSA without a drafter, P > D": stock(2, 1, draft=None, **OF_DSA),
    "DSA without a drafter, P < D": stock(1, 2, draft=None, **OF_DSA),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_needs_no_plugin_is_right(name: str) -> None:
    outcome = run(RIGHT[name])
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (4, 2)])
def test_gather_is_wrong_without_an_error(prefill_tp: int, decode_tp: int) -> None:
    """The fault this project exists for, and proof that the comparison sees it."""
    outcome = run(stock(prefill_tp, decode_tp))
    assert outcome.statuses == {"success"}
    assert outcome.wrong
    assert all("draft entry" in wrong for wrong in outcome.wrong)


def test_scatter_is_wrong_at_low_page_numbers() -> None:
    """Stray bytes stay inside the pool at low page numbers; elsewhere the session dies."""
    requests = (Request(8), Request(4))
    outcome = run(stock(1, 2, requests=requests, shuffled=False))
    assert outcome.statuses == {"success"}
    assert any("draft entry" in wrong for wrong in outcome.wrong)


def test_dcp_with_a_hybrid_target_is_silently_wrong() -> None:
    """One of two prefill ranks sends nothing (P > D). test_matrix.py has the same case with the
    plugin."""
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
def test_context_parallelism_at_unequal_tp_ends_prefills_thread(
    monkeypatch: pytest.MonkeyPatch, hybrid: bool, backend: str
) -> None:
    """No request of this prefill rank is served any more. With the plugin: test_matrix.py."""
    monkeypatch.setattr("rig.ring.rank.LIMIT_S", 20)
    outcome = run(stock(1, 2, dcp=2, hybrid=hybrid, requests=(Request(8),)))
    assert "success" not in outcome.statuses
    if backend == "mooncake":
        assert any("has ended" in wrong for wrong in outcome.wrong)
