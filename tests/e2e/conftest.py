"""Real servers, each deployment started once and stopped before the next one starts.

pytest groups the tests by the parameter of ``pd``, so every test of one pair of servers runs
while that pair is up. The single server comes first, and stays only as its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from sglang_mixkv.tools.launch import Topology
from sglang_mixkv.tools.pair import Answer, prompts
from sglang_mixkv.tools.processes import Fleet
from sglang_mixkv.tools.servers import Deployment, DraftBytes, disaggregated, single

START_TIMEOUT = pytest.mark.timeout(1800)
"""Two deployments may start within one test, on a machine that has other work."""

ENABLE = ("--enable-mixkv",)
TP1, TP2 = ("--tp", "1"), ("--tp", "2")
TP2_DP2 = (*TP2, "--dp", "2", "--enable-dp-attention")


@dataclass(frozen=True)
class Case:
    """Two servers with mixkv on both sides."""

    name: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    pair: str = "mla"


CASES = [
    Case("P2-D1", TP2, TP1),
    Case("P1-D2", TP1, TP2),
    pytest.param(Case("P2-D2dp", TP2, TP2_DP2), marks=pytest.mark.full),
    pytest.param(Case("gqa-P2-D1", TP2, TP1, "gqa"), marks=pytest.mark.full),
    pytest.param(Case("gqa-P1-D2", TP1, TP2, "gqa"), marks=pytest.mark.full),
]


@dataclass(frozen=True)
class Measured:
    """A running pair with mixkv, and what it did with the fixed prompts."""

    deployment: Deployment
    answers: list[Answer]
    reference: list[Answer]
    draft: DraftBytes | None


@pytest.fixture(scope="session")
def reference() -> Callable[[str], list[Answer]]:
    """The single server's answers, by name of the model pair."""
    known: dict[str, list[Answer]] = {}

    def answers(pair: str) -> list[Answer]:
        if pair not in known:
            with Fleet() as fleet:
                server = single(fleet, pair)
                known[pair] = [server.ask(prompt) for prompt in prompts()]
        return known[pair]

    return answers


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def pd(
    request: pytest.FixtureRequest, reference: Callable[[str], list[Answer]]
) -> Iterator[Measured]:
    """Each pair of servers with mixkv in turn."""
    case: Case = request.param
    expected = reference(case.pair)
    with Fleet() as fleet:
        topology = Topology(case.prefill, case.decode, ENABLE, ENABLE)
        deployment = disaggregated(fleet, case.pair, topology)
        answers = [deployment.ask(prompt) for prompt in prompts()]
        yield Measured(deployment, answers, expected, deployment.draft_bytes())
