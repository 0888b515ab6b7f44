"""Test pairs with different releases of SGLang on the two sides, as during a rolling upgrade.

The same mix also runs without the plugin, to show whether SGLang itself serves it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from mixkv_demo.client import Answer, accept_length, generate
from mixkv_demo.launch import Topology
from mixkv_demo.pair import prompts, request_body
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import disaggregated
from sglang_mixkv.decode.compare import MIXES
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG
from sglang_mixkv.tools.client import RequestFailed

from .conftest import COLLAPSED, ENABLE, START_TIMEOUT, TP1, TP2, Reference, same

pytestmark = [START_TIMEOUT, pytest.mark.full]

ROOT = Path(__file__).parents[2]
ANSWER_S = 60.0


def python(version: str) -> Path:
    """Return the Python interpreter of a release's environment (scripts/env.sh)."""
    name = ".venv" if version == SUPPORTED_SGLANG[-1] else f".venv-{version}"
    found = ROOT / name / "bin" / "python"
    if not found.exists():
        pytest.skip(f"NOT TESTED: MIXKV_SGLANG={version} bash scripts/test.sh makes {found}")
    return found


def answers_of(prefill: str, decode: str, backend: str, flags: tuple[str, ...]) -> list[Answer]:
    """Start this mix, and return its answers; raise RequestFailed if a request fails."""
    topology = Topology(TP2, TP1, flags, flags, backend=backend)
    with Fleet() as fleet:
        deployment = disaggregated(
            fleet, "mla", topology,
            prefill=lambda server: replace(server, argv=(str(python(prefill)), *server.argv[1:])),
            decode=lambda server: replace(server, argv=(str(python(decode)), *server.argv[1:])),
        )  # fmt: skip
        bodies = map(request_body, prompts())
        return [generate(deployment.url, body, ANSWER_S) for body in bodies]


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize(("prefill", "decode"), permutations(SUPPORTED_SGLANG, 2))
def test_a_mix_is_served_if_sglang_serves_it(
    prefill: str, decode: str, backend: str, reference: Reference
) -> None:
    if (prefill, decode) not in MIXES[backend]:
        with pytest.raises(RequestFailed, match="MIXKV-PAIR-03"):
            answers_of(prefill, decode, backend, ENABLE)
        with pytest.raises(RequestFailed):
            answers_of(prefill, decode, backend, ())
        return
    expected = reference("mla", ()).fixed
    answers = answers_of(prefill, decode, backend, ENABLE)
    same(answers, expected)
    stock = answers_of(prefill, decode, backend, ())
    assert [a.tokens for a in stock] == [a.tokens for a in expected]
    assert accept_length(stock) < COLLAPSED
