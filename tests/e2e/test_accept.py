"""`accept` passes a pair of real servers with the plugin, and fails a pair without it.

The stock pair's output is correct, but nearly all of its draft tokens are rejected.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mixkv_demo.launch import Topology
from mixkv_demo.pair import model_path, prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import disaggregated, single
from sglang_mixkv.tools import accept

from .conftest import COLLAPSED, ENABLE, START_TIMEOUT, TP1, TP2

GOOD = 3.3


def write_prompts(path: Path) -> Path:
    """Write the prompts to a file, half of them as token ids and half as text."""
    known = json.loads((model_path("mla") / "tokenizer.json").read_text())["model"]["vocab"]
    word = {number: text for text, number in known.items()}
    path.write_text("\n".join(
        json.dumps({"input_ids": ids}) if number % 2 else " ".join(word[n] for n in ids[1:-1])
        for number, ids in enumerate(prompts())
    ))  # fmt: skip
    return path


def run_harness(
    of_single: list[str], topology: Topology, figures: Path
) -> tuple[int, dict[str, object]]:
    """Run `accept` against this pair, and return its exit status and figures."""
    with Fleet() as fleet:
        url = disaggregated(fleet, "mla", topology).url
        status = accept.main([*of_single, "--pair", url, "--json", str(figures)])
    return status, json.loads(figures.read_text())


@START_TIMEOUT
@pytest.mark.full
def test_accept_passes_the_plugin_and_fails_stock(tmp_path: Path) -> None:
    file, figures = write_prompts(tmp_path / "prompts"), tmp_path / "figures.json"
    with Fleet() as fleet:
        of_single = ["--single", single(fleet, "mla").url, "--prompts", str(file)]
        broken, stock = run_harness(of_single, Topology(TP2, TP1), figures)
    topology = Topology(TP2, TP1, ENABLE, ENABLE)
    right, mixkv = run_harness(["--baseline", str(figures)], topology, tmp_path / "again")
    assert (broken, right) == (1, 0)
    assert mixkv["single"]["accept_length"] > GOOD
    assert stock["pair"]["accept_length"] < COLLAPSED
    for found in (stock, mixkv):
        assert found["same_output"] == found["prompts"] == len(prompts())
