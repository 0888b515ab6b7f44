"""A decode server's own page tells warm drafters from cold ones, and how well each kind drafts."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from mixkv_demo.launch import without_drafter
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, totals
from sglang_mixkv.tools.client import Answer, acceptance_by_position

from .conftest import NEEDED, START_TIMEOUT, TP1, TP2, Case, Counts, pair_with, unchanged

pytestmark = START_TIMEOUT

REST_S = 30


def finished(deployment: Deployment, before: Counts, requests: int) -> Counts:
    """What has been counted since, once so many requests have ended."""
    deadline = time.monotonic() + REST_S
    while True:
        found = totals(deployment.servers)
        found.subtract(before)
        number = sum(n for (name, *_), n in found.items() if name == "finished_requests_total")
        if number >= requests:
            return found
        assert time.monotonic() < deadline, f"{number} of {requests} requests are counted"
        time.sleep(0.5)


def drafted(answers: list[Answer], state: str, *reason: str) -> Counts:
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
    case = Case(state, TP2, TP1)
    case.skip_unserved()
    with Fleet() as fleet:
        change = without_drafter if state == "cold" else unchanged
        deployment = pair_with(fleet, case.topology(), prefill=change)
        before = finished(deployment, Counter(), 1)  # the first request is only to get through
        answers = [deployment.ask(prompt) for prompt in prompts()]
        found = finished(deployment, before, len(answers))
    reason = ("no_drafter",) if state == "cold" else ()
    for name in ("rooms_total", "prefill_rooms_total", "finished_requests_total"):
        assert found[(name, state, *reason)] == len(answers)
    assert (found[NEEDED] > 0) == (state == "warm")
    expected = drafted(answers, state, *reason)
    names = {name for name, *_ in expected}
    assert +Counter({key: n for key, n in found.items() if key[0] in names}) == +expected
