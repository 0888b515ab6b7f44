"""Stock SGLang with a patch from upstream/ moves the drafter's KV correctly.

test_upstream.py runs this module in a process whose SGLang is patched. test_stock.py has the same
kind of tests without a patch."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace
from pure.tools.test_plan import MLA, pair
from rig.ring.model import Cache, Case, Request
from rig.ring.run import run

from sglang_mixkv.tools.plan_pair import need_of

from .test_stock import stock


def drafter(heads: int, **kwargs: object) -> Cache:
    return Cache("mha", heads=heads, **kwargs)


LONG = Request(23, chunk_pages=2), Request(9, prefix_pages=1)
DSA = Cache("mla", layers=4, k_bytes=24, index_k=(True, False, True, False))
DRAFT_HEADS: dict[str, Case] = {
    # P > D
    "2-1, 2 heads": stock(2, 1, draft=drafter(2), page_size=1),
    "2-1, 1 head": stock(2, 1, draft=drafter(1)),
    "2-1, 6 heads": stock(2, 1, draft=drafter(6, layers=2), requests=LONG),
    "4-1, 2 heads": stock(4, 1, draft=drafter(2, k_bytes=12)),
    "4-2, 4 heads": stock(4, 2, draft=drafter(4, v_bytes=4), decode_dp=2),
    "4-2, 8 heads, hybrid": stock(4, 2, draft=drafter(8), hybrid=True),
    "3-1, 3 heads": stock(3, 1, draft=drafter(3), page_size=8),
    "5-1, 5 heads": stock(5, 1, draft=drafter(5)),
    "7-1, 7 heads": stock(7, 1, draft=drafter(7), requests=LONG),
    "2-1, 4 heads, DSA": stock(2, 1, target=DSA, page_size=64, requests=(Request(150),)),
    # P < D
    "1-2, 2 heads": stock(1, 2, draft=drafter(2), requests=LONG),
    "1-2, 1 head": stock(1, 2, draft=drafter(1), page_size=1),
    "1-2, 6 heads": stock(1, 2, draft=drafter(6, k_bytes=4), prefills=2),
    "1-4, 2 heads": stock(1, 4, draft=drafter(2, dtype="fp8")),
    "2-4, 4 heads": stock(2, 4, draft=drafter(4), prefill_dp=2),
    "2-4, 8 heads, hybrid": stock(2, 4, draft=drafter(8, layers=3), hybrid=True),
    "1-3, 3 heads": stock(1, 3, draft=drafter(3)),
    "1-5, 5 heads": stock(1, 5, draft=drafter(5), page_size=2),
    "1-7, 7 heads": stock(1, 7, draft=drafter(7)),
    "2-4, 8 heads, stages": stock(2, 4, draft=drafter(8), prefill_pp=2),
    "4-2, 4 heads, stages": stock(4, 2, draft=drafter(4), prefill_pp=2, requests=LONG),
    "2-1, 4 heads, hybrid, stages": stock(2, 1, draft=drafter(4), hybrid=True, prefill_pp=2),
}
DCP: dict[str, Case] = {
    f"DCP, {heads} heads, {prefill}-2": stock(
        prefill, 2, dcp=2, hybrid=True, draft=drafter(heads), requests=(Request(23), Request(8))
    )
    for heads, prefill in product((2, 4), (2, 4))
}


@pytest.mark.parametrize("name", DRAFT_HEADS)
def test_draft_heads(name: str) -> None:
    check(DRAFT_HEADS[name])


@pytest.mark.parametrize("name", DCP)
def test_dcp_hybrid_draft(name: str) -> None:
    check(DCP[name])


def test_l3_draft_keys() -> None:
    """`plan` reports that no pair needs the plugin for HiCache's storage. The patch's own test
    compares the keys."""
    assert not need_of(*pair(8, 16, 8, store="")).needed


def check(case: Case) -> None:
    """Check that all bytes are correct, and that `plan` reports that no plugin is needed."""
    mla = replace(MLA, hybrid=case.hybrid)
    prefill, decode = pair(case.prefill_tp, case.decode_tp, case.draft.heads, target=mla)
    need = need_of(prefill, replace(decode, dcp_size=case.dcp))
    outcome = run(case)
    is_right = outcome.statuses == {"success"} and not outcome.wrong
    assert need.needed is not is_right, f"plan and the ring differ: {need}"
    assert is_right, [outcome.reasons, *outcome.wrong]
