"""On GPUs, a pair with the plugin has the single server's output and accept length.

Each case starts a single server (shared by cases with the same flags) and a pair, and sends both
the small pair's prompts (mixkv_demo/pair.py), whose accept length drops to 1 if draft KV is wrong.
With one card, all ranks share it, and gloo replaces NCCL (mixkv_demo/one_gpu). With two or more,
each rank of a server has its own card. The first case also runs on the CPU engine, with --full.

Only this module of tests/gpu needs SGLang and the extra `demo`.
"""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import pytest

from mixkv_demo import launch, one_gpu
from mixkv_demo.client import Answer, NoAnswer, accept_length, generate
from mixkv_demo.launch import Launch, Topology, without_drafter
from mixkv_demo.pair import prompts, request_body
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, bring_up, silent, single
from sglang_mixkv.config import PLANE_ENV

from .conftest import no_cuda

TP1, TP2 = ("--tp", "1"), ("--tp", "2")
PAGES, CHUNKS = ("--page-size", "64"), ("--chunked-prefill-size", "64")  # prompts of up to 202
# A collective through host memory cannot be captured. Ranks may share a card, so only a side with
# TP 1 uses CUDA graphs.
GRAPHS = ("--cuda-graph-backend-decode=full", "--cuda-graph-max-bs-decode", "4")
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
NO_OVERLAP = ("--disable-overlap-schedule",)
CLIENTS, ASKED, HANG_UP_S = 16, 96, (0.02, 0.4)
SENT, NEEDED = ("sent_bytes_total", "draft"), ("needed_bytes_total", "draft")
WARM, NO_DRAFTER = ("rooms_total", "warm"), ("rooms_total", "cold", "no_drafter")


@dataclass(frozen=True)
class Case:
    """A pair. `both`: flags for both sides and the single server. `exact`: also compare the outputs
    (with 8-bit KV, TP 2 and TP 1 round differently, which may break ties differently). `crowd`: run
    CLIENTS concurrent clients first, half of which disconnect. `drafts`: prefill has a drafter."""

    name: str
    prefill: tuple[str, ...] = TP2
    decode: tuple[str, ...] = TP1
    pair: str = "mla"
    both: tuple[str, ...] = ()
    backend: str = "mooncake"
    exact: bool = True
    crowd: bool = False
    drafts: bool = True

    def servers(self, device: str) -> tuple[Launch, Launch, Launch]:
        flags, env = ("--enable-mixkv",), {PLANE_ENV: self.backend}
        topology = Topology(
            (*self.prefill, *self.both), (*self.decode, *self.both), flags, flags,
            backend=self.backend, device=device, env=env,
        )  # fmt: skip
        prefill, decode, port = launch.prefill_and_decode(self.pair, topology)
        prefill = prefill if self.drafts else without_drafter(prefill)
        return prefill, decode, launch.router(prefill, decode, port)


CASES = [
    Case("2-1-chunks-of-pages-of-64", (*TP2, *CHUNKS), both=PAGES),
    Case("2-1-page-1", both=("--page-size", "1")),
    Case("1-2", TP1, TP2),
    Case("1-2-nixl", TP1, TP2, backend="nixl"),
    Case("2-1-nixl-pages-of-64", backend="nixl", both=PAGES),
    Case("2-1-dspark", pair="mla-dspark"),
    Case("1-2-dspark", TP1, TP2, "mla-dspark"),
    Case("2-1-dflash", pair="mla-dflash"),
    Case("1-2-dflash-pages-of-64", TP1, TP2, "mla-dflash", PAGES),
    Case("2-1-gqa", pair="gqa"),
    Case("2-1-fp8", both=FP8, exact=False),
    Case("1-2-fp8-pages-of-64", TP1, TP2, both=(*FP8, *PAGES), exact=False),
    Case("2-1-graphs", decode=(*TP1, *GRAPHS)),
    Case("2-1-graphs-dspark", decode=(*TP1, *GRAPHS), pair="mla-dspark"),
    Case("2-1-no-overlap", both=NO_OVERLAP),
    Case("2-1-crowd", crowd=True),
    Case("1-2-crowd-chunks", (*TP1, *CHUNKS), TP2, crowd=True),
    Case("2-1-decode-alone-drafts", drafts=False),
]


def ask_all(deployment: Deployment, pair: str) -> list[Answer]:
    return [deployment.ask(prompt) for prompt in prompts(pair=pair)]


@cache
def single_server(pair: str, both: tuple[str, ...], device: str) -> list[Answer]:
    with Fleet() as fleet:
        return ask_all(single(fleet, pair, both, device=device), pair)


def crowd(deployment: Deployment, pair: str) -> list[Answer]:
    """Run many clients, half of which disconnect early, and return the others' answers."""
    source, asked = random.Random(1), prompts(pair=pair)
    patience = [source.uniform(*HANG_UP_S) if number % 2 else None for number in range(ASKED)]

    def one(number: int) -> Answer | None:
        prompt, limit = asked[number // 2 % len(asked)], patience[number]
        if limit is None:
            return deployment.ask(prompt)
        with suppress(NoAnswer):
            generate(deployment.url, request_body(prompt), limit)
        return None

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [answer for answer in pool.map(one, range(ASKED)) if answer]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "cuda" and (why := no_cuda()):
        pytest.skip(f"no CUDA device: {why}")
    for package in ("sglang", "sglang_router"):
        reason = f"no {package}: install the plugin with [sglang,demo]"
        pytest.importorskip(package, reason=reason, exc_type=ImportError)
    return found


ON_GPU = [pytest.param("cuda", case, id=f"cuda-{case.name}") for case in CASES]
ON_CPU = pytest.param("cpu", CASES[0], id="cpu", marks=pytest.mark.full)


@pytest.mark.timeout(1800)  # for the CPU engine on two busy cores
@pytest.mark.parametrize(("device", "case"), [*ON_GPU, ON_CPU], indirect=["device"])
def test_output_and_accept_length_match_the_single_server(
    device: str, case: Case, figures: Callable[..., None]
) -> None:
    engine = "nixl" if case.backend == "nixl" else "mooncake.engine"
    pytest.importorskip(engine, exc_type=ImportError)  # a library may be missing
    expected = single_server(case.pair, case.both, device)
    servers = case.servers(device)
    with Fleet() as fleet:
        bring_up(fleet, servers, silent)
        deployment = Deployment(fleet, servers[-1].url, servers[:-1], servers[-1:])
        waited = crowd(deployment, case.pair) if case.crowd else []
        before = deployment.counters()
        answers = ask_all(deployment, case.pair)
        counted = deployment.counters()
    counted.subtract(before)
    length, right = accept_length(answers), accept_length(expected)
    equal = sum(a.tokens == e.tokens for a, e in zip(answers, expected, strict=True))
    sent, needed = counted[SENT], counted[NEEDED]
    figures(case=case.name, device=device, cards=one_gpu.cards(), accept_length=length,
            single=right, equal=equal, asked=len(answers), sent=sent, needed=needed)  # fmt: skip
    assert right > 2, "the single server's accept length is too low to reveal wrong draft KV"
    assert equal == len(answers) or not case.exact
    if not case.drafts:
        assert 1 < length < 0.9 * right
        assert (counted[NO_DRAFTER], counted[WARM], sent) == (len(answers), 0, 0)
        return
    near = pytest.approx(right, rel=0.02 if case.exact else 0.05)
    assert length == near
    assert counted[WARM] == len(answers)
    assert sent == needed > 0
    assert not waited or accept_length(waited) == near


def processes_by_card() -> Counter[str]:
    """Return the number of processes with memory on each card, from nvidia-smi."""
    query = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return Counter(line.split(",")[0] for line in set(done.stdout.splitlines()))


def test_no_rank_has_memory_on_another_ranks_card() -> None:
    """Prefill uses cards 0 and 1, and decode uses card 1. A CUDA context on a further card would
    take about 500 MiB."""
    if (count := 0 if no_cuda() else one_gpu.cards()) < 2:
        pytest.skip(f"two GPUs are needed, and there are {count}")
    case = Case("2-1-on-two-cards", decode=(*TP1, "--base-gpu-id", "1"))
    before = processes_by_card()
    with Fleet() as fleet:
        bring_up(fleet, case.servers("cuda"), silent)  # a first request has been served
        new = processes_by_card()
    new.subtract(before)
    if not +new:
        pytest.skip("nvidia-smi lists no processes: in a container, start it with --pid=host")
    assert sorted((+new).values()) == [1, 2]
