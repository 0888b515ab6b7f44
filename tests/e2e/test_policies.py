"""Real servers with a policy of their own: drafters that do not fit, and checksums."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sglang_mixkv.demo.launch import Launch, Topology
from sglang_mixkv.demo.pair import cousins, prompts
from sglang_mixkv.demo.processes import Fleet
from sglang_mixkv.demo.servers import Deployment, disaggregated
from sglang_mixkv.tools.client import Answer, accept_length

from .conftest import (
    ENABLE,
    START_TIMEOUT,
    TP1,
    TP2,
    WINDOW,
    Reference,
    counts,
    pair_with,
    record,
    without_drafter,
)

pytestmark = [START_TIMEOUT, pytest.mark.full]

COLD = (*ENABLE, "--mixkv-on-draft-mismatch", "cold")
VERIFY = (*ENABLE, "--mixkv-verify", "checksum")


def one_by_one(deployment: Deployment) -> list[Answer]:
    return [deployment.ask(prompt) for prompt in prompts()]


def at_once(deployment: Deployment) -> list[Answer]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(deployment.ask, cousins()))


def with_window(server: Launch) -> Launch:
    return replace(server, argv=(*server.argv, *WINDOW))


@pytest.mark.parametrize("change", [with_window, without_drafter], ids=["window", "no-drafter"])
def test_cold_drafters_change_the_accept_length_alone(
    change: Callable[[Launch], Launch], reference: Reference
) -> None:
    """The prefill server's drafter has a window that decode's has not, or there is none."""
    expected = reference("mla", ())
    with Fleet() as fleet:
        deployment = pair_with(fleet, Topology(TP2, TP1, COLD, COLD), prefill=change)
        before = counts(deployment)["cold_requests"]
        for answers, same in (
            (one_by_one(deployment), expected.fixed),
            (at_once(deployment), expected.cousins),
        ):
            record(f"P2-D1 cold, {change.__name__}", answers, same)
            assert [a.tokens for a in answers] == [a.tokens for a in same]
            assert 1 < accept_length(answers) < 0.9 * accept_length(same)
        asked = len(prompts()) + len(cousins())
        assert counts(deployment)["cold_requests"] - before == asked
        assert counts(deployment)["draft_bytes_sent"] == 0


def test_checksums_find_nothing_wrong(reference: Reference) -> None:
    """Every request is verified. SGLang's own checksum is a CUDA kernel and cannot run here."""
    expected = reference("mla", ())
    topology = Topology(TP2, TP1, VERIFY, VERIFY)
    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", topology)
        before = counts(deployment)["rooms_verified"]
        for answers, same in (
            (one_by_one(deployment), expected.fixed),
            (at_once(deployment), expected.cousins),
        ):
            record("P2-D1 checksums", answers, same)
            assert [a.tokens for a in answers] == [a.tokens for a in same]
            assert accept_length(answers) == pytest.approx(accept_length(same), rel=0.02)
        asked = len(prompts()) + len(cousins())
        assert counts(deployment)["rooms_verified"] - before == asked
