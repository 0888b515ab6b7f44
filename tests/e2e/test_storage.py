"""Servers of different attention-TP sizes share HiCache's storage (Mooncake's store), and each rank
reads the draft KV of its own heads.

Stored pages outlive the servers. The servers' own caches are flushed, so that hits come from the
store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rig.process.store import store, stored

from mixkv_demo.client import Answer, accept_length
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, disaggregated, single
from sglang_mixkv.tools.client import RequestFailed, request

from .conftest import (
    BY_PAGE,
    COLLAPSED,
    DECODE_HOST,
    HOST_CACHE,
    NEEDED,
    PAGES,
    START_TIMEOUT,
    TP1,
    TP2,
    Case,
    Counts,
    Reference,
    all_arrived,
    answered,
    same,
)

pytestmark = [START_TIMEOUT, pytest.mark.full]
KEY = "storage"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def flags(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the flags of a server that uses the store, and waits until all stored pages of a
    prompt are loaded."""
    return (
        *BY_PAGE, "--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config",
        json.dumps(config), "--hicache-storage-prefetch-policy", "wait_complete",
    )  # fmt: skip


def forget(deployment: Deployment, config: dict[str, Any]) -> None:
    """Flush the servers' own caches. Stored pages remain."""
    assert stored(config) > 0
    for server in deployment.servers:
        request("POST", f"{server.url}/flush_cache?timeout=60", headers=HEADERS)


def attach(url: str, backend: str, config: dict[str, Any]) -> None:
    """Attach the storage to a running server."""
    body = {
        "hicache_storage_backend": backend, "hicache_write_policy": "write_through",
        "hicache_storage_backend_extra_config_json": json.dumps(config),
        "hicache_storage_prefetch_policy": "wait_complete",
    }  # fmt: skip
    request("PUT", f"{url}/hicache/storage-backend", 120, json=body, headers=HEADERS)


@contextmanager
def running(pair: str, prefill: tuple[str, ...], decode: tuple[str, ...]) -> Iterator[Deployment]:
    case = Case("storage", prefill, decode, pair)
    case.skip_unserved()
    with Fleet() as fleet:
        yield disaggregated(fleet, pair, case.topology())


def asked(deployment: Deployment, pair: str, expected: list[Answer]) -> tuple[list[int], Counts]:
    """Send the prompts, check the answers against the single server's, and return the number of
    tokens of each prompt that prefill found in the store."""
    answers, counted = answered(deployment, expected, prompts(pair=pair))
    print("from storage", [answer.storage_tokens for answer in answers], counted[NEEDED])
    same(answers, expected)
    all_arrived(counted)
    return [answer.storage_tokens for answer in answers], counted


@pytest.mark.parametrize("pair", ["mla", "gqa"])
def test_servers_of_both_sizes_share_a_store(pair: str, reference: Reference) -> None:
    expected = reference(pair, ()).fixed
    # The first prompt is excluded, since it was sent when the servers started.
    pages = [len(prompt) // 16 * 16 for prompt in prompts(pair=pair)][1:]
    with Fleet() as fleet:
        config = store(fleet, prefetch_threshold=16)
        stores = flags(config)
        with running(pair, (*TP2, *HOST_CACHE, *stores), (*TP1, *PAGES)) as of_two:
            found, alone = asked(of_two, pair, expected)
            assert not any(found)
            forget(of_two, config)
            found, _ = asked(of_two, pair, expected)
            assert found[1:] == pages
            forget(of_two, config)
        # The sizes are swapped. Decode finds the pages of the earlier prefill server, which had the
        # same size. Prefill finds only target pages, which without draft pages are not a hit.
        with running(pair, (*TP1, *HOST_CACHE, *stores), (*TP2, *DECODE_HOST, *stores)) as other:
            found, counted = asked(other, pair, expected)
            assert not any(found)
            assert counted[NEEDED] < alone[NEEDED] / 2
            forget(other, config)
            found, _ = asked(other, pair, expected)
            assert found[1:] == pages
            forget(other, config)
        # The first sizes again, after a restart. Prefill attaches the store while it runs.
        later = (*TP2, *HOST_CACHE, *BY_PAGE, "--admin-api-key", KEY)
        with running(pair, later, (*TP1, *DECODE_HOST, *stores)) as again:
            with pytest.raises(RequestFailed, match=r"MIXKV-START-03.*other than mooncake"):
                attach(again.prefill, "file", {})
            attach(again.prefill, "mooncake", config)
            forget(again, config)
            found, counted = asked(again, pair, expected)
            assert found[1:] == pages
            assert counted[NEEDED] < alone[NEEDED] / 2


def test_stock_reads_wrong_heads_at_a_smaller_size(reference: Reference) -> None:
    """Stock single servers of TP 2 and then TP 1 use one store. The output of the second server is
    correct, but its accept length collapses."""
    expected = reference("mla", ()).fixed
    found = []
    with Fleet() as shared:
        config = store(shared, prefetch_threshold=16)
        for tp in TP2, TP1:
            with Fleet() as fleet:
                server = single(fleet, "mla", (*tp, *HOST_CACHE, *flags(config)))
                found.append([server.ask(prompt) for prompt in prompts()])
                stored(config)
    print([accept_length(answers) for answers in found])
    assert [a.tokens for a in found[1]] == [a.tokens for a in expected]
    assert all(answer.storage_tokens for answer in found[1][1:])
    assert accept_length(found[1]) < COLLAPSED < accept_length(found[0])
