"""Real servers that compare checksums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mixkv_demo.launch import Topology
from mixkv_demo.pair import cousins, prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import disaggregated
from sglang_mixkv.tools.client import accept_length

from .conftest import ENABLE, START_TIMEOUT, TP1, TP2, Reference, counts, record, warm_share

pytestmark = [START_TIMEOUT, pytest.mark.full]

VERIFY = (*ENABLE, "--mixkv-verify", "checksum")


def test_checksums_find_nothing_wrong(reference: Reference) -> None:
    """A segment whose checksum differs would make its request's drafter cold."""
    expected = reference("mla", ())
    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", Topology(TP2, TP1, VERIFY, VERIFY))
        before = counts(deployment)
        with ThreadPoolExecutor(8) as pool:
            answers = [deployment.ask(prompt) for prompt in prompts()]
            at_once = list(pool.map(deployment.ask, cousins()))
        counted = counts(deployment)
        counted.subtract(before)
    same = [*expected.fixed, *expected.cousins]
    record("P2-D1 checksums", [*answers, *at_once], same, warm_share(counted))
    assert [a.tokens for a in (*answers, *at_once)] == [a.tokens for a in same]
    assert accept_length([*answers, *at_once]) == pytest.approx(accept_length(same), rel=0.02)
    assert warm_share(counted) == 1
