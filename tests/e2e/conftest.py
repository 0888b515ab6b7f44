"""Real servers, each deployment started once and stopped before the next one starts.

pytest groups the tests by the parameter of ``pd``, so every test of one pair of servers runs
while that pair is up. The single server comes first, and stays only as its answers. At the end
the figures of every pair that ran are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from rig.unserved import skip_unserved

from sglang_mixkv.demo.launch import Topology
from sglang_mixkv.demo.pair import PAIRS, cousins, prompts
from sglang_mixkv.demo.processes import Fleet
from sglang_mixkv.demo.servers import Deployment, DraftBytes, disaggregated, single
from sglang_mixkv.tools.client import Answer, accept_length

START_TIMEOUT = pytest.mark.timeout(1800)
"""Two deployments may start within one test, on a machine that has other work."""

ENABLE = ("--enable-mixkv",)
TP1, TP2 = ("--tp", "1"), ("--tp", "2")
TP1_PP2 = (*TP1, "--pp-size", "2")
TP2_DP2 = (*TP2, "--attn-dp-size", "2")
TP2_DP2_OLDER = (*TP2, "--dp", "2", "--enable-dp-attention")
PAGES = ("--page-size", "16")
CHUNKS = ("--chunked-prefill-size", "64")
DECODE_CACHE = ("--disaggregation-decode-enable-radix-cache",)
WINDOW = ("--speculative-draft-window-size", "128")


@dataclass(frozen=True)
class Case:
    """Two servers with mixkv on both sides. ``shared``: flags of the single server as well.
    ``spawn``: ranks start as on GPUs."""

    name: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    pair: str = "mla"
    shared: tuple[str, ...] = ()
    backend: str = "mooncake"
    spawn: bool = False

    @property
    def decode_caches(self) -> bool:
        return DECODE_CACHE[0] in self.decode

    @property
    def prefill_ranks_share(self) -> bool:
        """Whether a prompt that comes again meets the prefill rank that has it cached."""
        return not {"--dp", "--attn-dp-size"} & set(self.prefill)

    def topology(self) -> Topology:
        return Topology(
            (*self.prefill, *self.shared), (*self.decode, *self.shared), ENABLE, ENABLE,
            backend=self.backend, spawn=self.spawn,
        )  # fmt: skip


def full(*args: object) -> object:
    """A case that runs with --full only."""
    return pytest.param(Case(*args), marks=pytest.mark.full)


CASES = [
    Case("P2-D1-chunks", (*TP2, *PAGES, *CHUNKS), (*TP1, *PAGES)),
    Case("dflash-P1-D2", TP1, TP2, "mla-dflash", spawn=True),
    Case("nixl-P2-D1", TP2, TP1, backend="nixl"),
    full("P1-D2", TP1, TP2),
    full("nixl-P1-D2", TP1, TP2, "mla", (), "nixl"),
    full("dflash-P2-D1", TP2, TP1, "mla-dflash"),
    full("dspark-P2-D1", (*TP2, *PAGES, *CHUNKS), (*TP1, *PAGES), "mla-dspark"),
    full("dspark-P1-D2", TP1, TP2, "mla-dspark"),
    full("dspark-P1pp2-D2", TP1_PP2, TP2, "mla-dspark"),
    full("P2-D1-decode-cache", (*TP2, *PAGES), (*TP1, *PAGES, *DECODE_CACHE)),
    full("P1-D2-decode-cache", (*TP1, *CHUNKS), (*TP2, *DECODE_CACHE)),
    full("P2-D2dp", TP2, TP2_DP2),
    full("nixl-P2-D2dp", TP2, TP2_DP2, "mla", (), "nixl"),
    full("P2dp-D2dp", TP2_DP2_OLDER, TP2_DP2),
    full("gqa-P2-D1", (*TP2, *PAGES, *CHUNKS), (*TP1, *PAGES), "gqa"),
    full("gqa-P1-D2", TP1, (*TP2, *DECODE_CACHE), "gqa"),
    full("P2-D1-window", (*TP2, *PAGES), (*TP1, *PAGES), "mla", WINDOW),
    full("P1-D2-window-decode-cache", TP1, (*TP2, *DECODE_CACHE), "mla", WINDOW),
]


@dataclass(frozen=True)
class Answers:
    """To the fixed prompts, and to those that share their first halves."""

    fixed: list[Answer]
    cousins: list[Answer]


@dataclass(frozen=True)
class Measured:
    """A running pair with mixkv, and what it did with the fixed prompts, sent one by one."""

    case: Case
    deployment: Deployment
    answers: list[Answer]
    reference: Answers
    draft: DraftBytes | None

    def draft_bytes(self) -> DraftBytes:
        """The counters now; a pair with mixkv always counts."""
        now = self.deployment.draft_bytes()
        assert now is not None
        return now


FIGURES: list[str] = []


def record(name: str, answers: list[Answer], reference: list[Answer]) -> None:
    """Keep the accept lengths of a run for the summary."""
    lengths = f"{accept_length(answers):.3f}  single {accept_length(reference):.3f}"
    same = sum(a.tokens == b.tokens for a, b in zip(answers, reference, strict=True))
    FIGURES.append(f"{name:<44} {lengths}  outputs equal {same}/{len(answers)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("accept lengths, pair against single server")
        terminalreporter.write("\n".join([*FIGURES, ""]))


Reference = Callable[[str, tuple[str, ...]], Answers]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The single server's answers, by name of the model pair and its further flags."""
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


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def pd(request: pytest.FixtureRequest, reference: Reference) -> Iterator[Measured]:
    """Each pair of servers with mixkv in turn."""
    case: Case = request.param
    radix = "--disaggregation-decode-enable-radix-cache" in (*case.decode, *case.shared)
    skip_unserved(
        case.backend, PAIRS[case.pair].algorithm, disaggregation_decode_enable_radix_cache=radix
    )
    expected = reference(case.pair, case.shared)
    with Fleet() as fleet:
        deployment = disaggregated(fleet, case.pair, case.topology())
        answers = [deployment.ask(prompt) for prompt in prompts(pair=case.pair)]
        record(case.name, answers, expected.fixed)
        yield Measured(case, deployment, answers, expected, deployment.draft_bytes())
