"""Real servers with a policy of their own: drafters that do not fit, and checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sglang_mixkv.demo import launch
from sglang_mixkv.demo.launch import Launch, Topology
from sglang_mixkv.demo.pair import cousins, prompts
from sglang_mixkv.demo.processes import Fleet
from sglang_mixkv.demo.servers import Deployment, bring_up, disaggregated, silent
from sglang_mixkv.tools.client import Answer, accept_length

from .conftest import ENABLE, START_TIMEOUT, TP1, TP2, WINDOW, Reference, record

pytestmark = [START_TIMEOUT, pytest.mark.full]

COLD = (*ENABLE, "--mixkv-on-draft-mismatch", "cold")
VERIFY = (*ENABLE, "--mixkv-verify", "checksum")


def counted(deployment: Deployment, name: str) -> float:
    """The sum of one counter over all processes, once the counters rest."""
    deployment.draft_bytes()
    return sum(json.loads(f.read_text()).get(name, 0) for f in deployment.stats.glob("*.json"))


def one_by_one(deployment: Deployment) -> list[Answer]:
    return [deployment.ask(prompt) for prompt in prompts()]


def at_once(deployment: Deployment) -> list[Answer]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(deployment.ask, cousins()))


def without_drafter(server: Launch) -> Launch:
    """The same server without speculation."""
    words = list(server.argv)
    while found := [word for word in words if word.startswith("--speculative-")]:
        start = words.index(found[0])
        del words[start : start + 2]
    return replace(server, argv=tuple(words))


def with_window(server: Launch) -> Launch:
    return replace(server, argv=(*server.argv, *WINDOW))


@pytest.mark.parametrize("change", [with_window, without_drafter], ids=["window", "no-drafter"])
def test_cold_drafters_change_the_accept_length_alone(
    change: Callable[[Launch], Launch], reference: Reference
) -> None:
    """The prefill server's drafter has a window that decode's has not, or there is none."""
    expected = reference("mla", ())
    with Fleet() as fleet:
        stats = fleet.folder("stats")
        topology = Topology(TP2, TP1, COLD, COLD)
        prefill, decode, port = launch.prefill_and_decode("mla", topology, str(stats))
        prefill = change(prefill)
        router = launch.router(prefill, decode, port)
        bring_up(fleet, [prefill, decode, router], silent)
        deployment = Deployment(fleet, router.url, stats, (prefill, decode))
        before = counted(deployment, "cold_requests")
        for answers, same in (
            (one_by_one(deployment), expected.fixed),
            (at_once(deployment), expected.cousins),
        ):
            record(f"P2-D1 cold, {change.__name__}", answers, same)
            assert [a.tokens for a in answers] == [a.tokens for a in same]
            assert 1 < accept_length(answers) < 0.9 * accept_length(same)
        asked = len(prompts()) + len(cousins())
        assert counted(deployment, "cold_requests") - before == asked
        assert counted(deployment, "draft_bytes_sent") == 0


def test_checksums_find_nothing_wrong(reference: Reference) -> None:
    """Every request is verified. SGLang's own checksum is a CUDA kernel and cannot run here."""
    expected = reference("mla", ())
    topology = Topology(TP2, TP1, VERIFY, VERIFY)
    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", topology)
        before = counted(deployment, "rooms_verified")
        for answers, same in (
            (one_by_one(deployment), expected.fixed),
            (at_once(deployment), expected.cousins),
        ):
            record("P2-D1 checksums", answers, same)
            assert [a.tokens for a in answers] == [a.tokens for a in same]
            assert accept_length(answers) == pytest.approx(accept_length(same), rel=0.02)
        asked = len(prompts()) + len(cousins())
        assert counted(deployment, "rooms_verified") - before == asked
