"""Pairs of real servers with mixkv do what the single server does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import requests

from mixkv_demo.launch import HOST, Launch, ranks, run_by, without_drafter
from mixkv_demo.pair import cousins, prompts, request_body
from mixkv_demo.processes import Fleet
from sglang_mixkv.tools.client import (
    Answer,
    RequestFailed,
    accept_length,
    generate,
    post,
    read_stream,
    session,
)

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
    cold,
    counts,
    drafted,
    pair_with,
    record,
    warm_share,
)

pytestmark = START_TIMEOUT


def same(answers: list[Answer], reference: list[Answer]) -> None:
    """Every token as the single server's, and the accept length within 2 %."""
    assert [a.tokens for a in answers] == [a.tokens for a in reference]
    assert accept_length(answers) == pytest.approx(accept_length(reference), rel=0.02)


def all_arrived(counted: Counts) -> None:
    """No draft byte is missing or sent twice, and no rank has been cold."""
    assert counted[SENT] == counted[NEEDED] > 0
    assert warm_share(counted) == 1, counted


def test_output_and_accept_length_are_the_single_servers(pd: Measured) -> None:
    same(pd.answers, pd.reference.fixed)


def test_every_draft_byte_arrives_once(pd: Measured) -> None:
    all_arrived(pd.counts)


def test_a_decode_servers_page_says_how_well_warm_drafters_do(pd: Measured) -> None:
    """As the answers do."""
    if ranks(pd.case.decode) > 1:
        pytest.skip("several ranks count")
    page_is_the_answers(pd.counts, pd.answers, "warm")


def page_is_the_answers(counted: Counts, answers: list[Answer], *state: str) -> None:
    assert counted["finished_requests_total", *state] == len(answers)
    expected = drafted(answers, *state)
    names = {name for name, *_ in expected}
    assert {key: n for key, n in counted.items() if key[0] in names and n} == +expected


def test_repeated_prompts(pd: Measured) -> None:
    """The prefill finds them in its radix cache, unless they come to another of its DP ranks; with
    a host cache, on the host. A decode server with a radix cache has most pages too."""
    before = pd.now()
    answers = [pd.deployment.ask(prompt) for prompt in prompts(pair=pd.case.pair)]
    counted = pd.since(before)
    record(f"{pd.case.name}, again", answers, pd.reference.fixed, warm_share(counted))
    same(answers, pd.reference.fixed)
    all_arrived(counted)
    cached = [answer.cached_tokens > 0 for answer in answers]
    assert all(cached) or not pd.case.prefill_ranks_share
    if pd.case.prefill_evicts:
        assert [a.host_tokens for a in answers] == [a.cached_tokens for a in answers]
    assert (counted[NEEDED] < pd.counts[NEEDED] / 2) == pd.case.decode_caches


def test_eight_requests_at_once_with_cached_prefixes(pd: Measured) -> None:
    """Their first halves are in the caches, their second halves are new."""
    before = pd.now()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(pd.deployment.ask, cousins(pd.case.pair)))
    counted = pd.since(before)
    record(f"{pd.case.name}, 8 at once", answers, pd.reference.cousins, warm_share(counted))
    same(answers, pd.reference.cousins)
    all_arrived(counted)


def test_samples_that_would_share_a_number_are_refused(pd: Measured) -> None:
    """The router gives all of them one. No server ends, and what follows is right."""
    body = request_body(prompts(pair=pd.case.pair)[0])
    body["sampling_params"]["n"] = 2
    for url in [pd.deployment.url] * 20 + [server.url for server in pd.deployment.servers]:
        with pytest.raises(RequestFailed, match=r"HTTP 400 .*MIXKV-PAIR-09.* got n = 2"):
            generate(url, {**body, "bootstrap_room": 5})
    same([pd.deployment.ask(prompts(pair=pd.case.pair)[0])], pd.reference.fixed[:1])


def test_a_number_that_two_requests_have_at_once(pd: Measured) -> None:
    """On each server one of two fails, of any DP rank, and the other is right."""
    servers = pd.deployment.servers
    port = servers[0].argv[servers[0].argv.index("--disaggregation-bootstrap-port") + 1]
    where = {"bootstrap_host": HOST, "bootstrap_port": int(port), "bootstrap_room": 6}
    body = {**request_body(prompts(pair=pd.case.pair)[0]), **where}
    with ThreadPoolExecutor(4) as pool:
        for server in servers:
            twice = [pool.submit(generate, server.url, body) for _ in range(2)]
            done, (first,) = wait(twice, return_when=FIRST_COMPLETED)
            assert "MIXKV-PAIR-09" in str([one.exception() for one in done])
    assert first.result().tokens == pd.reference.fixed[0].tokens


def test_a_request_that_decode_retracts(pd: Measured) -> None:
    """Prefill computes it again, with the same number (true retraction)."""
    prompt, before = prompts(pair=pd.case.pair)[0], pd.now()

    def lines(response: requests.Response) -> Iterator[bytes]:
        for number, line in enumerate(response.iter_lines()):
            if number == 0:
                for path, body in ("pause", {"mode": "retract"}), ("continue", {}):
                    url = f"{pd.deployment.servers[1].url}/{path}_generation"
                    post(url, body).raise_for_status()
            yield line

    url, body = f"{pd.deployment.url}/generate", {**request_body(prompt), "stream": True}
    with session() as made, made.post(url, json=body, stream=True, timeout=60) as response:
        reply, _ = read_stream(url, lines(response))
    assert tuple(reply["output_ids"]) == pd.reference.fixed[0].tokens
    ranks = pd.counts[WARM] / len(pd.answers)
    assert pd.since(before)[WARM] == 2 * ranks


def gqa_staged(prefill: tuple[str, ...], decode: tuple[str, ...], name: str) -> Case:
    return Case(f"gqa-{name}, SGLang's staging buffer", prefill, decode, "gqa")


STAGED_CASES = [
    gqa_staged((*TP2, *PAGES, *CHUNKS), (*TP1, *PAGES), "P2-D1"),
    gqa_staged((*TP1, *PAGES), (*TP2, *PAGES), "P1-D2"),
]


@pytest.mark.full
@pytest.mark.parametrize("case", STAGED_CASES, ids=["P2-D1", "P1-D2"])
def test_a_gqa_target_through_sglangs_staging_buffer(case: Case, reference: Reference) -> None:
    """SGLang stages the target's heads, the channel the drafter's: each its own."""
    expected = reference("gqa", ()).fixed

    def staging(server: Launch) -> Launch:
        return run_by(server, Path(staging_on_cpu.__file__), staging_on_cpu.ENV)

    with Fleet() as fleet:
        deployment = pair_with(fleet, case.topology(), "gqa", prefill=staging, decode=staging)
        before = counts(deployment)
        answers = [deployment.ask(prompt) for prompt in prompts(pair="gqa")]
        counted = counts(deployment)
        counted.subtract(before)
        staged = (fleet.root / "decode" / "log").read_text().count(staging_on_cpu.STAGED)
    record(case.name, answers, expected, warm_share(counted))
    same(answers, expected)
    all_arrived(counted)
    assert staged >= len(answers)


@pytest.mark.full
@pytest.mark.parametrize("pair", ["mla-dflash", "mla"])
def test_a_pair_that_drafts_on_decode_alone(pair: str, reference: Reference) -> None:
    """The drafter is cold, the output is the single server's."""
    case = Case(f"{pair}-P2-D1, decode alone drafts", TP2, TP1, pair)
    case.skip_unserved()
    expected = reference(pair, ()).fixed
    with Fleet() as fleet:
        deployment = pair_with(fleet, case.topology(), pair, prefill=without_drafter)
        before = counts(deployment)
        answers = [deployment.ask(prompt) for prompt in prompts(pair=pair)]
        counted = counts(deployment)
        counted.subtract(before)
    record(case.name, answers, expected, warm_share(counted))
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert 1 < accept_length(answers) < 0.9 * accept_length(expected)
    assert counted["rooms_total", "cold", "no_drafter"] == cold(counted) == len(answers)
    assert counted[WARM] == counted[SENT] == 0
    if pair == "mla":
        page_is_the_answers(counted, answers, "cold", "no_drafter")
