"""SGLang's hierarchical cache on prefill: a prefix that comes back from the host has its draft KV,
and is sent as any other."""

from __future__ import annotations

import pytest
from rig.host_cache import HostCache
from rig.model import Cache, Case, Request
from rig.ring import run
from rig.special import Special

pytestmark = pytest.mark.transports(every=20)

REQUESTS = (Request(23), Request(8, chunk_pages=1), Request(13))
MLA, GQA = Cache("mla", layers=2, k_bytes=24), Cache("mha", layers=2, heads=4)
SIDECAR = {
    "mla+gqa1": (MLA, Cache("mha", heads=1)),
    "mla+gqa8 of 2 layers": (MLA, Cache("mha", layers=2, heads=8)),
    "gqa+gqa2": (GQA, Cache("mha", heads=2, k_bytes=4, v_bytes=4)),
}
PACKED = {
    "mla+nextn": (MLA, Cache("mla", k_bytes=24)),
    "gqa+nextn": (GQA, Cache("mha", heads=4)),
}
PAIRS = [
    *((*pair, False) for pair in SIDECAR.values()),
    *((*pair, True) for pair in PACKED.values()),
]
LAYOUTS = ("layer_first", "page_first_direct")
SHAPES = [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("target", "draft", "packed"), PAIRS, ids=[*SIDECAR, *PACKED])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHAPES)
def test_every_byte_that_came_back_from_the_host(
    prefill_tp: int, decode_tp: int, target: Cache, draft: Cache, packed: bool, layout: str
) -> None:
    special = Special(host_cache=HostCache(layout, packed))
    case = Case(
        prefill_tp, decode_tp, target=target, draft=draft, requests=REQUESTS, special=special
    )
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("sent_bytes_total") == outcome.total("needed_bytes_total")
    assert draft.is_mla or outcome.total("sent_bytes_total") > 0  # SGLang moves that itself


@pytest.mark.mooncake_only
@pytest.mark.parametrize("packed", [False, True], ids=["sidecar", "packed"])
def test_without_the_drafts_copy_another_requests_rows_are_sent(packed: bool) -> None:
    """What the first test would say if SGLang restored the target alone."""
    target, draft = PACKED["gqa+nextn"]
    special = Special(host_cache=HostCache(LAYOUTS[0], packed, restores_draft=False))
    outcome = run(Case(2, 1, target=target, draft=draft, requests=REQUESTS, special=special))
    assert outcome.statuses == {"success"}
    assert outcome.wrong
    assert all(" draft entry " in line for line in outcome.wrong)
