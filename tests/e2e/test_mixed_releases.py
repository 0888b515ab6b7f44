"""A pair whose sides run different releases of SGLang, as in a rolling upgrade.

Which mixes SGLang itself serves is measured beside it, without the plugin.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from mixkv_demo.launch import Launch, Topology
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG
from sglang_mixkv.tools.client import Answer, accept_length

from .conftest import ENABLE, START_TIMEOUT, TP1, TP2, Change, Reference, pair_with, record

pytestmark = [START_TIMEOUT, pytest.mark.full]

ROOT = Path(__file__).parents[2]
COLLAPSED = 1.3


def python(version: str) -> Path:
    """The interpreter of that release's environment (scripts/env.sh)."""
    name = ".venv" if version == SUPPORTED_SGLANG[-1] else f".venv-{version}"
    found = ROOT / name / "bin" / "python"
    if not found.exists():
        pytest.skip(f"NOT TESTED: MIXKV_SGLANG={version} bash scripts/test.sh makes {found}")
    return found


def on(version: str) -> Change:
    def change(server: Launch) -> Launch:
        return replace(server, argv=(str(python(version)), *server.argv[1:]))

    return change


def asked(deployment: Deployment) -> list[Answer]:
    return [deployment.ask(prompt) for prompt in prompts()]


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize(("prefill", "decode"), permutations(SUPPORTED_SGLANG, 2))
def test_a_mix(prefill: str, decode: str, backend: str, reference: Reference) -> None:
    expected = reference("mla", ()).fixed
    for flags in (ENABLE, ()):
        topology = Topology(TP2, TP1, flags, flags, backend=backend)
        with Fleet(Path(os.environ["KEEP"]) if "KEEP" in os.environ else None) as fleet:
            deployment = pair_with(fleet, topology, prefill=on(prefill), decode=on(decode))
            answers = asked(deployment)
        way = "plugin" if flags else "stock"
        record(f"{prefill} -> {decode}, {backend}, {way}", answers, expected)
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        if flags:
            assert accept_length(answers) == pytest.approx(accept_length(expected), rel=0.02)
        else:
            assert accept_length(answers) < COLLAPSED
