"""Fixtures with real servers. Each deployment starts once, and stops before the next one starts.

pytest groups the tests by the parameter of ``pd``, so all tests of a pair of servers run while that
pair is up. The single server runs first, and only its answers are retained.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from rig.ring.unserved import skip_unserved

from mixkv_demo.client import Answer, accept_length
from mixkv_demo.launch import Topology
from mixkv_demo.pair import PAIRS, cousins, prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import (
    Deployment,
    disaggregated,
    single,
)

START_TIMEOUT = pytest.mark.timeout(1800)
"""Two deployments may start within one test, on a busy machine."""

ENABLE = ("--enable-mixkv",)
COLLAPSED = 1.3  # a lower accept length shows that the drafter has no KV of the prompt
TP1, TP2 = ("--tp", "1"), ("--tp", "2")
TP1_PP2 = (*TP1, "--pp-size", "2")
TP2_DP2 = (*TP2, "--attn-dp-size", "2")
TP2_DP2_OLDER = (*TP2, "--dp", "2", "--enable-dp-attention")
PAGES = ("--page-size", "16")
CHUNKS = ("--chunked-prefill-size", "64")
DECODE_CACHE = ("--disaggregation-decode-enable-radix-cache",)
WINDOW = ("--speculative-draft-window-size", "128")


HOST_CACHE = (
    *PAGES, "--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-ratio", "4",
    "--max-total-tokens", "640",
)  # fmt: skip
"""The pool is smaller than all prompts together, so a prompt is evicted before it is repeated."""
BY_PAGE = ("--hicache-mem-layout", "page_first_direct")
# Decode reserves tokens for a request's output.
DECODE_HOST = (
    *HOST_CACHE, *DECODE_CACHE, "--max-total-tokens", "1024", "--num-reserved-decode-tokens", "256",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A prefill and a decode server with the plugin. ``shared``: flags for both sides and the
    single server. ``spawn``: ranks are spawned, as on GPUs. ``patience``: factor for the channel's
    time limits, since these servers share two cores."""

    name: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    pair: str = "mla"
    shared: tuple[str, ...] = ()
    backend: str = "mooncake"
    spawn: bool = False
    patience: str = "5"

    @property
    def decode_caches(self) -> bool:
        return DECODE_CACHE[0] in self.decode

    @property
    def prefill_evicts(self) -> bool:
        return HOST_CACHE[-1] in self.prefill

    @property
    def prefill_ranks_share(self) -> bool:
        """Return True if a repeated prompt always reaches the prefill rank that has cached it."""
        return not {"--dp", "--attn-dp-size"} & set(self.prefill)

    def topology(self) -> Topology:
        env = {"SGLANG_MIXKV_PATIENCE": self.patience}
        return Topology(
            (*self.prefill, *self.shared), (*self.decode, *self.shared), ENABLE, ENABLE,
            backend=self.backend, spawn=self.spawn, env=env,
        )  # fmt: skip

    def skip_unserved(self) -> None:
        flags = {*self.prefill, *self.decode, *self.shared}
        skip_unserved(
            PAIRS[self.pair].algorithm,
            disaggregation_decode_enable_radix_cache=DECODE_CACHE[0] in flags,
            enable_hierarchical_cache="--enable-hierarchical-cache" in {*self.decode, *self.shared},
        )


def full(*args: object, **kwargs: object) -> object:
    """Make a case that runs only with --full."""
    return pytest.param(Case(*args, **kwargs), marks=pytest.mark.full)


CASES = [
    Case("P2-D1", (*TP2, *PAGES, *CHUNKS), (*TP1, *PAGES)),
    Case("nixl-dflash-P1-D2", TP1, TP2, "mla-dflash", backend="nixl", spawn=True),
    full("P2-host-D1", (*TP2, *HOST_CACHE), (*TP1, *PAGES)),
    full("P2-D2dp", TP2, TP2_DP2),
    full("P1-D2", TP1, TP2, patience="1"),
    full("nixl-P2-D1", TP2, TP1, backend="nixl"),
    full("nixl-P1-D2", TP1, TP2, backend="nixl"),
    full("P2dp-D1", TP2_DP2_OLDER, TP1),
    full("dspark-P1pp2-D2", TP1_PP2, TP2, "mla-dspark"),
    full("gqa-P2-D1", (*TP2, *PAGES, *CHUNKS), (*TP1, *PAGES), "gqa"),
    full("P1-host-D2", (*TP1, *HOST_CACHE, *BY_PAGE), (*TP2, *PAGES)),
    full("P2-host-of-D1", (*TP2, *PAGES), (*TP1, *DECODE_HOST)),
    full("P2-D1-decode-cache", (*TP2, *PAGES), (*TP1, *PAGES, *DECODE_CACHE)),
    full("P1-D2-window-decode-cache", TP1, (*TP2, *DECODE_CACHE), shared=WINDOW),
    full("gqa-P1-D2-decode-cache", TP1, (*TP2, *DECODE_CACHE), "gqa"),
    full("P2dp-D2dp", TP2_DP2_OLDER, TP2_DP2),
]


Counts = Counter[tuple[str, ...]]
"""The plugin's metrics of all servers, by name and label values."""
REST_S = 30
SENT, NEEDED = ("sent_bytes_total", "draft"), ("needed_bytes_total", "draft")
WARM = ("rooms_total", "warm")


@dataclass(frozen=True)
class Answers:
    """The single server's answers to the fixed prompts, and to other prompts with the same first
    halves (`cousins`)."""

    fixed: list[Answer]
    cousins: list[Answer]


@dataclass(frozen=True)
class Measured:
    """A running pair with the plugin, and its answers and metrics for the fixed prompts, sent one
    by one."""

    case: Case
    deployment: Deployment
    answers: list[Answer]
    reference: Answers
    counts: Counts


def finished(deployment: Deployment, before: Counts, requests: int) -> Counts:
    """Wait until this many requests are counted as finished since `before`, and return the
    difference of the metrics."""
    deadline = time.monotonic() + REST_S
    while True:
        found = deployment.counters()
        found.subtract(before)
        number = sum(n for (name, *_), n in found.items() if name == "finished_requests_total")
        if number >= requests:
            return found
        assert time.monotonic() < deadline, f"{number} of {requests} requests are counted"


def cold(counted: Counts) -> float:
    """Return the number of cold rooms on all decode ranks."""
    return sum(number for at, number in counted.items() if at[:2] == ("rooms_total", "cold"))


def warm_share(counted: Counts) -> float:
    """Return the share of warm rooms on all decode ranks."""
    return counted[WARM] / max(1, counted[WARM] + cold(counted))


def answered(
    deployment: Deployment,
    expected: list[Answer],
    asked: list[list[int]],
    ask: Callable[[list[int]], Answer] | None = None,
    at_once: int = 1,
) -> tuple[list[Answer], Counts]:
    """Send these prompts, and return their answers and metrics. pytest's -rP shows the accept
    length beside that of the single server."""
    before = deployment.counters()
    with ThreadPoolExecutor(at_once) as pool:
        answers = [*pool.map(ask or deployment.ask, asked)]
    counted = finished(deployment, before, len(answers))
    print(
        f"accept length {accept_length(answers):.3f}, single server {accept_length(expected):.3f}; "
        f"{warm_share(counted):.1%} of the rooms were warm"
    )
    return answers, counted


def same(answers: list[Answer], reference: list[Answer]) -> None:
    """Check that the tokens equal the single server's, and that the accept length is within 2 %."""
    assert [a.tokens for a in answers] == [a.tokens for a in reference]
    assert accept_length(answers) == pytest.approx(accept_length(reference), rel=0.02)


def all_arrived(counted: Counts) -> None:
    """Check that no draft byte is missing or sent twice, and that every room is warm."""
    assert counted[SENT] == counted[NEEDED] > 0
    assert warm_share(counted) == 1, counted


Reference = Callable[[str, tuple[str, ...]], Answers]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Return a function that returns the single server's answers for a model pair and flags."""
    known: dict[tuple[str, tuple[str, ...]], Answers] = {}

    def answers(pair: str, flags: tuple[str, ...]) -> Answers:
        if (pair, flags) not in known:
            with Fleet() as fleet:
                server = single(fleet, pair, flags)
                known[pair, flags] = Answers(
                    [server.ask(prompt) for prompt in prompts(pair=pair)],
                    [server.ask(prompt) for prompt in cousins(pair)],
                )
        return known[pair, flags]

    return answers


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pd(request: pytest.FixtureRequest, reference: Reference) -> Iterator[Measured]:
    """Run the pair of servers of each case, one after the other."""
    case: Case = request.param
    case.skip_unserved()
    expected = reference(case.pair, case.shared)
    with Fleet() as fleet:
        deployment = disaggregated(fleet, case.pair, case.topology())
        finished(deployment, Counter(), 1)  # the warm-up request
        answers, counted = answered(deployment, expected.fixed, prompts(pair=case.pair))
        yield Measured(case, deployment, answers, expected, counted)
