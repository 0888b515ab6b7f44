"""Many clients at once, some of whom hang up, and servers that are killed in the middle of it.

With MIXKV_LOAD_MINUTES=5 each crowd asks again, with other clients hanging up, until these have
passed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from rig.crowd import Crowd, Part, Servers
from rig.known import Known

from mixkv_demo.launch import Topology
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import single
from sglang_mixkv.tools.client import accept_length

MINUTES = float(os.environ.get("MIXKV_LOAD_MINUTES", "0"))
pytestmark = [pytest.mark.timeout(1200 + 60 * MINUTES), pytest.mark.full]

ENABLE = ("--enable-mixkv",)
UP, DOWN = ("--tp 2", "--tp 1"), ("--tp 1", "--tp 2")
TO_DP, DP = ("--tp 2", "--tp 2 --attn-dp-size 2"), ("--tp 2 --dp 2 --enable-dp-attention",) * 2
STAGES = ("--tp 1 --pp-size 2", "--tp 2")
COLD_SHARE, NEAR = 0.001, 0.02
TELLS = 2.0
"""With a shorter accept length the drafter hardly knows these prompts: wrong draft KV would not
show."""


def servers(of: tuple[str, str], backend: str, pair: str = "mla") -> Servers:
    prefill, decode = (tuple(flags.split()) for flags in of)
    env = {"SGLANG_MIXKV_PATIENCE": "5"}
    return Servers(Topology(prefill, decode, ENABLE, ENABLE, backend=backend, env=env), pair)


@pytest.fixture(scope="module")
def known(request: pytest.FixtureRequest) -> Iterator[Known]:
    with Fleet() as fleet:
        yield Known(single(fleet, getattr(request, "param", "mla")).url)


def are_served(running: Servers, known: Known, *crowds: Crowd) -> None:
    """Cold drafters, too, are somebody's trouble."""
    before, part, begin = running.rooms(), Part(), time.monotonic()
    for turn in count():
        for crowd in crowds:
            running.serve(replace(crowd, turn=turn), known, part)
        if time.monotonic() - begin >= 60 * MINUTES:
            break
    assert part.wrong == []
    assert part.hung_up > 0
    drafted, alone = (accept_length(list(answers)) for answers in zip(*part.answers, strict=True))
    assert abs(drafted - alone) <= NEAR * alone
    assert alone > TELLS
    assert running.held() == []
    rooms = running.rooms() - before
    cold = rooms["cold"] - rooms["cold_prefill_aborted"]  # their clients had hung up
    assert cold <= COLD_SHARE * (rooms["warm"] + cold)


@pytest.mark.parametrize(
    ("of", "backend", "known"),
    [
        (UP, "mooncake", "mla"), (DOWN, "nixl", "mla"), (TO_DP, "mooncake", "mla"),
        (DP, "nixl", "mla"), (STAGES, "mooncake", "mla-dspark"),
    ],
    indirect=["known"],
)  # fmt: skip
def test_nobody_pays_for_another(
    of: tuple[str, str], backend: str, known: Known, request: pytest.FixtureRequest
) -> None:
    pair = request.node.callspec.params["known"]
    with servers(of, backend, pair) as running:
        are_served(running, known, *(Crowd(30, n, at_once=n) for n in (16, 32, 48)))


@pytest.mark.parametrize(("of", "backend"), [(UP, "nixl"), (DOWN, "mooncake"), (TO_DP, "nixl")])
def test_nor_for_a_server_that_dies(of: tuple[str, str], backend: str, known: Known) -> None:
    """When a third of a crowd has its answers. Half of the time is the wait for what a killed
    server's requests leave."""
    crowd = Crowd(30, 3)
    with servers(of, backend) as running:
        lost = Part()
        for side in ("decode", "prefill"):
            until = crowd.requests // 3, lambda side=side: running.kill(side)
            running.serve(replace(crowd, hang_up=0.0), known, lost, until)
            running.restart(side)
            are_served(running, known, replace(crowd, seed=crowd.seed + len(side)))
        assert lost.failed == len(lost.wrong) > 0
