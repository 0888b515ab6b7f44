"""The draft channel in SGLang's own managers: every byte of every pool, over both data planes."""

from __future__ import annotations

from typing import Any

import pytest
from rig.model import Cache, Case, Request
from rig.ring import Outcome, run
from rig.special import Special

pytestmark = pytest.mark.transports(every=3)

REQUESTS = (
    Request(23, chunk_pages=2),
    Request(8, chunk_pages=1),
    Request(1),
    Request(12, prefix_pages=2),
)
HYBRID = {"target": Cache("mla", layers=4), "hybrid": True}
GQA = {"target": Cache("mha", layers=4, heads=4)}
BLOCK = {"draft": Cache("mha", layers=5, heads=8), "algorithm": "DFLASH"}
CASES: dict[str, dict[str, Any]] = {
    "2-1": {},
    "1-2": {},
    "1-1": {},
    "2-2": {},
    "8-1": {"draft": Cache("mha", heads=8)},
    "1-8": {"draft": Cache("mha", heads=8)},
    "4-2 replicated heads": {"draft": Cache("mha", heads=2)},
    "8-2 one head": {"draft": Cache("mha", heads=1)},
    "2-4 wide K": {"draft": Cache("mha", layers=3, heads=8, k_bytes=6, v_bytes=10)},
    "2-1 fp8": {"draft": Cache("mha", heads=4, dtype="fp8")},
    "2-1 block": BLOCK,
    "1-2 block": BLOCK,
    "2-1 hybrid": HYBRID,
    "1-2 hybrid": HYBRID,
    "2-1 gqa": GQA,
    "1-2 gqa": GQA,
    "2-1 stages": {"prefill_pp": 2, "target": Cache("mla", layers=4, k_bytes=24)},
    "2-2 dp on decode": {"decode_dp": 2},
    "1-2 dp on prefill": {"prefill_dp": 2},
    "2-1 two servers": {"prefills": 2},
    "1-4 dcp": {"dcp": 2, "draft": Cache("mha", heads=4)},
    "2-1 page of one": {"page_size": 1},
    "2-1 mla drafter": {"draft": Cache("mla", k_bytes=8)},
    "2-1 no drafter": {"draft": None},
}


def case(name: str, **special: Any) -> Case:
    prefill, _, rest = name.partition("-")
    more = dict(CASES.get(name, {}))
    if "dcp" in more:
        more["requests"] = (Request(23, chunk_pages=2), Request(8), Request(1))
    settings = {"requests": REQUESTS, "special": Special(**special), **more}
    return Case(int(prefill), int(rest.split()[0]), **settings)


def warm(outcome: Outcome, ranks: int, requests: int) -> None:
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("rooms_total", "warm") == ranks * requests
    assert outcome.total("sent_bytes_total") == outcome.total("needed_bytes_total")


@pytest.mark.parametrize("name", CASES)
def test_every_byte(name: str) -> None:
    one = case(name)
    outcome = run(one)
    shares = one.decode_dp  # each request is on the ranks of one of them
    warm(outcome, one.decode_tp * one.decode_dp // shares, len(one.requests))
    with_heads = one.draft is not None and not one.draft.is_mla
    assert (outcome.total("sent_bytes_total") > 0) == with_heads


COLD: dict[str, dict[str, Any]] = {
    "no drafter on prefill": {"draft_on": {"prefill": False}},
    "no drafter on decode": {"draft_on": {"decode": False}},
}


@pytest.mark.parametrize("lack", COLD)
@pytest.mark.parametrize("name", ["2-1", "1-2", "1-4 dcp"])
def test_a_side_without_a_drafter_is_served(name: str, lack: str) -> None:
    """The target is right. On decode the drafter's rows of these requests are zero."""
    one = case(name, **COLD[lack])
    outcome = run(one)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    cold = one.decode_tp * len(one.requests) if lack.endswith("prefill") else 0
    assert outcome.total("rooms_total", "cold", "no_drafter") == cold
    assert outcome.total("rooms_total", "cold") == cold
    assert outcome.total("sent_bytes_total") == 0


@pytest.mark.mooncake_only
def test_an_mla_drafter_beside_a_gqa_target_is_refused_at_start() -> None:
    pair = {"target": Cache("mha", heads=4), "draft": Cache("mla", k_bytes=24)}
    outcome = run(Case(1, 1, requests=REQUESTS, **pair))
    assert len(outcome.wrong) == 2
    assert all("MIXKV-START-05" in error for error in outcome.wrong)
