"""If weights are updated on only one server, both servers report it."""

from __future__ import annotations

import pytest

from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, disaggregated
from sglang_mixkv.tools.client import request
from sglang_mixkv.tools.status import look, status

from .conftest import START_TIMEOUT, TP1, TP2, Case

pytestmark = [START_TIMEOUT, pytest.mark.full]
WEIGHTS = "weights_total"


def counted(pair: Deployment) -> dict[str, int]:
    """Return the weight comparisons on both sides, by result."""
    found = pair.counters()
    return {state: int(found[WEIGHTS, state]) for state in ("same", "different", "unknown")}


def update(pair: Deployment, server: int, version: str) -> None:
    """Load the server's weights again under another version."""
    url = pair.servers[server].url
    path = request("GET", f"{url}/get_model_info").json()["model_path"]
    body = {"model_path": path, "weight_version": version, "flush_cache": True}
    assert request("POST", f"{url}/update_weights_from_disk", 120, json=body).json()["success"]


def test_different_weight_versions_are_reported() -> None:
    case = Case("weights", TP2, TP1)
    case.skip_unserved()
    asked = prompts(4)
    with Fleet() as fleet:
        pair = disaggregated(fleet, "mla", case.topology())
        urls = [server.url for server in pair.servers]
        answers = [pair.ask(prompt).tokens for prompt in asked]
        before = counted(pair)
        assert before["same"] == before["different"] == 0 < before["unknown"]
        assert not status(*look(urls)).wrong
        update(pair, 1, "v2")
        assert [pair.ask(prompt).tokens for prompt in asked] == answers
        now = counted(pair)
        # two prefill ranks with one peer each, and a decode rank with two
        assert (now["same"], now["different"]) == (0, 4 * len(asked))
        assert now["unknown"] == before["unknown"]
        said = [one.what for one in status(*look(urls)).wrong]
        assert len(said) == 2
        assert all("weights have another version" in one for one in said)
        update(pair, 0, "v2")
        assert [pair.ask(prompt).tokens for prompt in asked] == answers
        assert counted(pair) == now | {"same": 4 * len(asked)}
