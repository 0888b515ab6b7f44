"""Today's way, as long as it is the default: ten cases; MIXKV_WAY=today runs all that there are."""

from __future__ import annotations

import pytest
from rig.model import Cache, Case, Request
from rig.ring import run

CHUNKS = (Request(23, chunk_pages=2), Request(8, chunk_pages=1), Request(12, prefix_pages=2))
MLA, GQA = Cache("mla", layers=4), Cache("mha", layers=2, heads=4)
CASES = [
    Case(2, 1, requests=CHUNKS),
    Case(1, 2, requests=CHUNKS),
    Case(2, 1, backend="nixl", requests=CHUNKS),
    Case(1, 2, backend="nixl", requests=CHUNKS),
    Case(2, 4, draft=Cache("mha", heads=2), target=GQA, requests=CHUNKS),
    Case(4, 2, draft=Cache("mha", heads=8), target=MLA, hybrid=True),
    Case(1, 2, backend="nixl", target=MLA, hybrid=True),
    Case(4, 2, dcp=2, requests=(Request(23, chunk_pages=1), Request(8))),
    Case(1, 2, prefill_pp=2, target=MLA, algorithm="DSPARK", requests=CHUNKS),
    Case(2, 1, decode_dp=2, backend="nixl", draft=Cache("mha", layers=5, heads=8)),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_every_byte(number: int) -> None:
    case = CASES[number]
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    sent = outcome.total("draft_bytes_sent")
    assert sent > 0
    assert case.dcp > 1 or sent == outcome.total("draft_bytes_needed")
    assert outcome.total("wire_bytes") == sent + outcome.total("target_bytes_sent")
