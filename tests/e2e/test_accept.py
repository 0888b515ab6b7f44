"""The acceptance harness on real servers: it tells a right pair from a broken one.

The broken one is stock: its output is right, and nearly every draft is lost.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mixkv_demo
from mixkv_demo.launch import Topology
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import disaggregated, single
from sglang_mixkv.tools import accept

from .conftest import COLLAPSED, ENABLE, START_TIMEOUT, TP1, TP2

pytestmark = [START_TIMEOUT, pytest.mark.full]

GOOD = 3.3
MODELS = Path(mixkv_demo.__file__).parent / "models"


def write_prompts(pair: str, path: Path) -> Path:
    """Ids and text, a half of the prompts each."""
    known = json.loads((MODELS / pair / "target" / "tokenizer.json").read_text())["model"]["vocab"]
    word = {number: text for text, number in known.items()}
    path.write_text("\n".join(
        json.dumps({"input_ids": ids}) if number % 2 else " ".join(word[n] for n in ids[1:-1])
        for number, ids in enumerate(prompts())
    ))  # fmt: skip
    return path


def run_harness(
    pair: str, of_single: list[str], topology: Topology, figures: Path
) -> tuple[int, dict[str, object]]:
    """Exit status and figures of `python -m sglang_mixkv accept` against this pair."""
    with Fleet() as fleet:
        url = disaggregated(fleet, pair, topology).url
        status = accept.main([*of_single, "--pair", url, "--json", str(figures)])
    return status, json.loads(figures.read_text())


@pytest.mark.parametrize("pair", ["mla", "gqa"])
def test_the_harness_tells_a_right_pair_from_a_broken_one(pair: str, tmp_path: Path) -> None:
    with Fleet() as fleet:
        url = single(fleet, pair).url
        file, figures = write_prompts(pair, tmp_path / "prompts"), tmp_path / "figures.json"
        of_single = ["--single", url, "--prompts", str(file)]
        broken, stock = run_harness(pair, of_single, Topology(TP2, TP1), figures)
    topology = Topology(TP2, TP1, ENABLE, ENABLE)
    right, mixkv = run_harness(pair, ["--baseline", str(figures)], topology, tmp_path / "again")
    assert (broken, right) == (1, 0)
    assert mixkv["single"]["accept_length"] > GOOD
    assert stock["pair"]["accept_length"] < COLLAPSED
    for found in (stock, mixkv):
        assert found["same_output"] == found["prompts"] == len(prompts())
