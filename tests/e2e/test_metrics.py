"""The shipped dashboard and alerts in a real Prometheus over real servers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_mixkv.demo.launch import HOST, Topology
from sglang_mixkv.demo.pair import prompts
from sglang_mixkv.demo.processes import Fleet
from sglang_mixkv.demo.prometheus import Expression, Prometheus, expressions
from sglang_mixkv.demo.servers import Deployment, disaggregated
from sglang_mixkv.next import series
from sglang_mixkv.series import FAMILIES
from sglang_mixkv.tools.client import Answer, accept_length

from .conftest import ENABLE, START_TIMEOUT, TP1, TP2

pytestmark = [
    START_TIMEOUT,
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs prometheus (scripts/prometheus.sh)"
    ),
]

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = expressions(DOCS / "dashboard.json", "2m")
WITHOUT_FAILURES = "sglang:num_transfer_failed_reqs_total"
"""SGLang's own; it has no value before the first failure."""

PREFIX = "sglang:mixkv_"


@dataclass(frozen=True)
class Monitored:
    """A pair with metrics on both sides after some requests, and the Prometheus beside it."""

    deployment: Deployment
    prometheus: Prometheus
    answers: list[Answer]

    def total(self, expression: str) -> float:
        (found,) = self.prometheus.query(f"sum({expression})")
        return found.value


@pytest.fixture(scope="module")
def monitored() -> Iterator[Monitored]:
    metrics = ("--enable-metrics",)
    topology = Topology((*TP2, *metrics), (*TP1, *metrics), ENABLE, ENABLE)
    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", topology)
        targets = [f"{HOST}:{server.port}" for server in deployment.servers]
        prometheus = Prometheus(fleet, targets, DOCS / "alerts.yml")
        prometheus.wait_for_scrape()  # one from before the requests
        answers = [deployment.ask(prompt) for prompt in prompts()]
        deployment.draft_bytes()  # returns when the counters rest
        for _ in range(2):  # and two from after them: rates need two
            prometheus.wait_for_scrape()
        yield Monitored(deployment, prometheus, answers)


def test_both_servers_are_scraped(monitored: Monitored) -> None:
    assert monitored.total("up") == 2


def is_of_the_channel(expression: Expression) -> bool:
    """This pair runs without it; test_channel_metrics.py has one."""
    theirs = {family.name for family in series.FAMILIES} - {family.name for family in FAMILIES}
    return any(name in expression.text for name in theirs)


@pytest.mark.parametrize("expression", DASHBOARD, ids=lambda e: f"{e.panel}: {e.legend}")
def test_every_panel_has_data(monitored: Monitored, expression: Expression) -> None:
    found = monitored.prometheus.query(expression.text)
    if WITHOUT_FAILURES in expression.text or is_of_the_channel(expression):
        return
    assert found
    assert all(math.isfinite(series.value) for series in found)


def test_every_rule_is_evaluated(monitored: Monitored) -> None:
    rules = monitored.prometheus.rules()
    assert {rule["type"] for rule in rules} == {"recording", "alerting"}
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("alerts")] == []
    for rule in rules:
        if rule["type"] == "recording":
            assert len(monitored.prometheus.query(rule["name"])) == 1, rule["name"]


def test_accept_length_is_that_of_the_answers(monitored: Monitored) -> None:
    """The servers have had one more request, the first."""
    tokens = monitored.total('sglang:generation_tokens_total{engine_type="decode"}')
    calls = monitored.total('sglang:spec_verify_calls_total{engine_type="decode"}')
    assert tokens / calls == pytest.approx(accept_length(monitored.answers), rel=0.03)


def test_both_sides_count_the_same_bytes(monitored: Monitored) -> None:
    for component in ("target", "draft"):
        sent, needed = (
            monitored.total(f'{PREFIX}{name}_bytes_total{{component="{component}"}}')
            for name in ("sent", "needed")
        )
        assert sent == needed > 0
    counted = monitored.deployment.draft_bytes()
    assert counted is not None
    assert counted.sent == sent == monitored.total(f'{PREFIX}sent_bytes_total{{component="draft"}}')


def test_sglangs_own_series_say_what_was_sent(monitored: Monitored) -> None:
    stock = monitored.total("sglang:kv_transfer_total_mb_sum") * 2**20
    assert stock == pytest.approx(monitored.total(f"{PREFIX}sent_bytes_total"))


def test_every_rank_has_its_own_series(monitored: Monitored) -> None:
    found = monitored.prometheus.query(f'{PREFIX}sent_bytes_total{{component="draft"}} > 0')
    assert {(s.labels["engine_type"], s.labels["tp_rank"]) for s in found} == {
        ("prefill", "0"), ("prefill", "1"),
    }  # fmt: skip
    (target,) = monitored.prometheus.query(f'{PREFIX}sent_bytes_total{{component="target"}} > 0')
    assert target.labels["tp_rank"] == "0", "one rank sends the latent rows"
