"""Prefixes that left the pool for the host come back with the drafter's KV.

The pools are smaller than the prompts together, so that each prompt that comes again was evicted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import requests

from mixkv_demo import launch
from mixkv_demo.launch import Launch, run_by
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, bring_up, disaggregated, silent
from sglang_mixkv.tools.client import Answer, accept_length

from .conftest import (
    COLLAPSED,
    DECODE_CACHE,
    HOST_CACHE,
    PAGES,
    START_TIMEOUT,
    TP1,
    TP2,
    Case,
    Reference,
    full,
    record,
)
from .test_pairs import same

pytestmark = START_TIMEOUT


ADMIN_KEY = "of the operator"
BY_PAGE = ("--hicache-mem-layout", "page_first_direct")
# Decode keeps room for what a request may still generate.
DECODE_HOST = (
    *HOST_CACHE, *DECODE_CACHE, "--max-total-tokens", "1024", "--num-reserved-decode-tokens", "256",
    "--enable-metrics",
)  # fmt: skip
HOST_CASES = [
    full("P1-D2-host", (*TP1, *HOST_CACHE, *BY_PAGE, "--admin-api-key", ADMIN_KEY), (*TP2, *PAGES)),
    full("P2-D1-decode-host", (*TP2, *PAGES), (*TP1, *DECODE_HOST)),
]
WITHOUT_DRAFT = Path(__file__).with_name("without_draft_copies.py")


def one_by_one(deployment: Deployment) -> list[Answer]:
    return [deployment.ask(prompt) for prompt in prompts()]


def loaded_back(server: Launch) -> float:
    """Tokens of KV that this server has loaded from its host cache, by SGLang's own count."""
    with requests.Session() as session:
        session.trust_env = False
        series = session.get(f"{server.url}/metrics", timeout=30).text
    found = re.findall(r'^sglang[:_]load_back_tokens_total\{.*pool="kv".*\} (\S+)', series, re.M)
    return sum(map(float, found))


def attach_a_storage(server: Launch) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        return session.put(
            f"{server.url}/hicache/storage-backend", timeout=60,
            json={"hicache_storage_backend": "file"},
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        )  # fmt: skip


def all_from_the_host(answers: list[Answer]) -> bool:
    return all(answer.host_tokens == answer.cached_tokens > 0 for answer in answers)


@pytest.mark.parametrize("case", HOST_CASES, ids=lambda case: case.name)
def test_a_pair_does_what_the_single_server_does(case: Case, reference: Reference) -> None:
    case.skip_unserved()
    expected = reference(case.pair, ()).fixed
    with Fleet() as fleet:
        deployment = disaggregated(fleet, case.pair, case.topology())
        cold, before = one_by_one(deployment), deployment.draft_bytes()
        again, after = one_by_one(deployment), deployment.draft_bytes()
        loaded = loaded_back(deployment.servers[1]) if case.decode_caches else 0
        attached = attach_a_storage(deployment.servers[0]) if ADMIN_KEY in case.prefill else None
    record(case.name, cold, expected)
    record(f"{case.name}, restored", again, expected)
    same(cold, expected)
    same(again, expected)
    assert before is not None
    assert after is not None
    assert before.sent == before.needed
    draft = after.since(before)
    assert draft.sent == draft.needed > 0
    assert loaded > 0 if case.decode_caches else all_from_the_host(again)
    assert (draft.needed < before.needed / 2) == case.decode_caches
    if attached is not None:
        assert attached.status_code == requests.codes.bad_request
        assert "--hicache-storage-backend with a drafter is not supported" in attached.text


@pytest.mark.full
@pytest.mark.parametrize("copied", [True, False], ids=["stock", "without draft copies"])
def test_a_single_server_and_its_control(copied: bool, reference: Reference) -> None:
    """The control says that the small pair notices what this file asks."""
    expected = reference("mla", ()).fixed
    server = launch.server("server", "mla", HOST_CACHE)
    server = server if copied else run_by(server, WITHOUT_DRAFT)
    with Fleet() as fleet:
        bring_up(fleet, [server], silent)
        deployment = Deployment(fleet, server.url, (server,))
        cold, again = one_by_one(deployment), one_by_one(deployment)
    record(f"single, host, draft copied: {copied}", again, expected)
    same(cold, expected)
    assert [a.tokens for a in again] == [a.tokens for a in expected]
    assert all_from_the_host(again)
    if copied:
        same(again, expected)
    else:
        assert accept_length(again) < COLLAPSED
