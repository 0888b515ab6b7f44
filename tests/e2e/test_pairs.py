"""Pairs of real servers with the plugin have the single server's output and accept length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from mixkv_demo.client import Answer, accept_length, generate, post
from mixkv_demo.launch import Launch, ranks, run_by, without_drafter
from mixkv_demo.pair import cousins, prompts, request_body
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import disaggregated
from sglang_mixkv.tools.client import RequestFailed, read_stream, session

from . import staging_on_cpu
from .conftest import (
    CHUNKS,
    NEEDED,
    PAGES,
    SENT,
    START_TIMEOUT,
    TP1,
    TP2,
    WARM,
    Case,
    Counts,
    Measured,
    Reference,
    all_arrived,
    answered,
    cold,
    same,
)

pytestmark = START_TIMEOUT


def test_output_and_accept_length_equal_the_single_servers(pd: Measured) -> None:
    """Every draft byte arrives once, and decode's metrics agree with the answers."""
    same(pd.answers, pd.reference.fixed)
    all_arrived(pd.counts)
    if ranks(pd.case.decode) == 1:  # otherwise several ranks count
        metrics_agree(pd.counts, pd.answers, "warm")


def metrics_agree(counted: Counts, answers: list[Answer], *state: str) -> None:
    assert counted["finished_requests_total", *state] == len(answers)
    rounds = sum(n for answer in answers for n in answer.rounds_by_right_drafts)
    right = sum(n * k for a in answers for k, n in enumerate(a.rounds_by_right_drafts))
    expected = Counts({("verify_rounds_total", *state): rounds})
    expected["accepted_tokens_total", *state] = rounds + right
    names = {name for name, *_ in expected}
    assert {key: n for key, n in counted.items() if key[0] in names and n} == +expected


def test_repeated_prompts(pd: Measured) -> None:
    """Prefill finds repeated prompts in its radix cache, or in its host cache, unless they reach
    another DP rank. A decode server with a radix cache needs less than half of the draft bytes."""
    fixed = pd.reference.fixed
    answers, counted = answered(pd.deployment, fixed, prompts(pair=pd.case.pair))
    same(answers, fixed)
    all_arrived(counted)
    cached = [answer.cached_tokens > 0 for answer in answers]
    assert all(cached) or not pd.case.prefill_ranks_share
    if pd.case.prefill_evicts:
        assert [a.host_tokens for a in answers] == [a.cached_tokens for a in answers]
    assert (counted[NEEDED] < pd.counts[NEEDED] / 2) == pd.case.decode_caches


def test_eight_requests_at_once_with_cached_prefixes(pd: Measured) -> None:
    """The first halves of the prompts are cached, and the second halves are new."""
    expected, of_pair = pd.reference.cousins, cousins(pd.case.pair)
    answers, counted = answered(pd.deployment, expected, of_pair, at_once=8)
    same(answers, expected)
    all_arrived(counted)


def test_samples_that_would_share_a_room_are_rejected(pd: Measured) -> None:
    """With `n` = 2, the router would give both samples the same room. The next request is
    correct."""
    body = request_body(prompts(pair=pd.case.pair)[0])
    body["sampling_params"]["n"] = 2
    for url in [pd.deployment.url] * 20 + [server.url for server in pd.deployment.servers]:
        with pytest.raises(RequestFailed, match=r"HTTP 400 .*MIXKV-PAIR-09.* got n = 2"):
            generate(url, {**body, "bootstrap_room": 5})
    same([pd.deployment.ask(prompts(pair=pd.case.pair)[0])], pd.reference.fixed[:1])


def test_a_request_that_bypasses_the_router_is_rejected(pd: Measured) -> None:
    """A request without a room is rejected with HTTP 400, and the error tells the client to use the
    router. The next request is correct."""
    body = request_body(prompts(pair=pd.case.pair)[0])
    for server in pd.deployment.servers:
        with pytest.raises(RequestFailed, match=r"HTTP 400 .*MIXKV-PAIR-09.* got none.* router"):
            generate(server.url, body)
    same([pd.deployment.ask(prompts(pair=pd.case.pair)[0])], pd.reference.fixed[:1])


def test_a_retracted_request_is_correct(pd: Measured) -> None:
    """After true retraction, prefill computes the request again with the same room number, and the
    output is correct."""
    prompt, before = prompts(pair=pd.case.pair)[0], pd.deployment.counters()

    def lines(response: requests.Response) -> Iterator[bytes]:
        for number, line in enumerate(response.iter_lines()):
            if number == 0:
                for path, body in ("pause", {"mode": "retract"}), ("continue", {}):
                    url = f"{pd.deployment.servers[1].url}/{path}_generation"
                    post(url, body).raise_for_status()
            yield line

    url, body = f"{pd.deployment.url}/generate", {**request_body(prompt), "stream": True}
    with session() as made, made.post(url, json=body, stream=True, timeout=60) as response:
        reply = read_stream(url, lines(response))
    assert reply.tokens == pd.reference.fixed[0].tokens
    ranks = pd.counts[WARM] / len(pd.answers)
    assert pd.deployment.counters()[WARM] - before[WARM] == 2 * ranks


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefill", "decode"), [((*TP2, *CHUNKS), TP1), (TP1, TP2)], ids=["P2-D1", "P1-D2"]
)
def test_a_gqa_target_through_sglangs_staging_buffer(
    prefill: tuple[str, ...], decode: tuple[str, ...], reference: Reference
) -> None:
    """SGLang's staging buffer moves the target's heads while the channel moves the drafter's."""
    case = Case("staging buffer", (*prefill, *PAGES), (*decode, *PAGES), "gqa")
    expected = reference("gqa", ()).fixed

    def staging(server: Launch) -> Launch:
        return run_by(server, Path(staging_on_cpu.__file__), staging_on_cpu.ENV)

    with Fleet() as fleet:
        deployment = disaggregated(fleet, "gqa", case.topology(), prefill=staging, decode=staging)
        answers, counted = answered(deployment, expected, prompts(pair="gqa"))
        staged = (fleet.root / "decode" / "log").read_text().count(staging_on_cpu.STAGED)
    same(answers, expected)
    all_arrived(counted)
    assert staged >= len(answers)


@pytest.mark.full
@pytest.mark.parametrize("pair", ["mla-dflash", "mla"])
def test_a_pair_with_a_drafter_only_on_decode(pair: str, reference: Reference) -> None:
    """The output equals the single server's, with a cold drafter."""
    case = Case("decode alone drafts", TP2, TP1, pair)
    case.skip_unserved()
    expected = reference(pair, ()).fixed
    with Fleet() as fleet:
        deployment = disaggregated(fleet, pair, case.topology(), prefill=without_drafter)
        answers, counted = answered(deployment, expected, prompts(pair=pair))
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert 1 < accept_length(answers) < 0.9 * accept_length(expected)
    assert counted["rooms_total", "cold", "no_drafter"] == cold(counted) == len(answers)
    assert counted[WARM] == counted[SENT] == 0
    if pair == "mla":
        metrics_agree(counted, answers, "cold", "no_drafter")
