"""A decode server's own page tells warm drafters from cold ones, and how well each kind drafts."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mixkv_demo.launch import HOST, without_drafter
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment
from sglang_mixkv.tools import pages
from sglang_mixkv.tools.client import Answer, acceptance_by_position

from .conftest import START_TIMEOUT, TP1, TP2, Case, pair_with, unchanged

pytestmark = START_TIMEOUT

METRICS = ("--enable-metrics",)
PREFIX = "sglang:mixkv_"
REST_S = 30


def page(deployment: Deployment) -> str:
    return pages.page(f"http://{HOST}:{deployment.servers[-1].port}/metrics")


def series(text: str) -> Counter[tuple[str, ...]]:
    """Name, and the values of its own labels -> value."""
    own = ("component", "state", "reason", "position", "against")
    found: Counter[tuple[str, ...]] = Counter()
    for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
        name = sample.name.replace("sglang_", "sglang:", 1)
        if name.startswith(PREFIX) and sample.labels.get("engine_type") == "decode":
            values = [sample.labels[label] for label in own if sample.labels.get(label)]
            found[name.removeprefix(PREFIX), *values] += int(sample.value)
    return found


def finished(text: str) -> int:
    return sum(n for key, n in series(text).items() if key[0] == "finished_requests_total")


def at_rest(deployment: Deployment, requests: int) -> str:
    """The page once so many requests have been counted."""
    deadline = time.monotonic() + REST_S
    while finished(text := page(deployment)) < requests and time.monotonic() < deadline:
        time.sleep(0.5)
    assert finished(text) == requests
    return text


def drafted(answers: list[Answer], state: str, *reason: str) -> Counter[tuple[str, ...]]:
    """What the answers themselves say."""
    rounds = [n for answer in answers for n in answer.rounds_by_right_drafts]
    right = sum(n * k for a in answers for n, k in enumerate(a.rounds_by_right_drafts))
    found = Counter({("verify_rounds_total", state, *reason): sum(rounds)})
    found["accepted_tokens_total", state, *reason] = sum(rounds) + right
    for position, share in enumerate(acceptance_by_position(answers, 8), 1):
        found["accepted_drafts_total", state, str(position)] = round(share * sum(rounds))
    return found


@pytest.mark.parametrize("state", ["warm", pytest.param("cold", marks=pytest.mark.full)])
def test_accept_length_by_state(state: str) -> None:
    case = Case(state, (*TP2, *METRICS), (*TP1, *METRICS))
    case.skip_unserved()
    with Fleet() as fleet:
        change = without_drafter if state == "cold" else unchanged
        deployment = pair_with(fleet, case.topology(), prefill=change)
        before = at_rest(deployment, 1)  # the first request, which is only to get through
        answers = [deployment.ask(prompt) for prompt in prompts()]
        after = at_rest(deployment, 1 + len(answers))
    found = series(after) - series(before)
    reason = ("no_drafter",) if state == "cold" else ()
    for name in ("rooms_total", "prefill_rooms_total", "finished_requests_total"):
        assert found[(name, state, *reason)] == len(answers)
    assert (found["needed_bytes_total", "draft"] > 0) == (state == "warm")
    expected = drafted(answers, state, *reason)
    names = {name for name, *_ in expected}
    assert +Counter({key: n for key, n in found.items() if key[0] in names}) == +expected
