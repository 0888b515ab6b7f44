"""The benchmarks of rings and of real pairs run, and their results have every part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import START_TIMEOUT

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def quick(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The result of a quick run. It raises of itself at a wrong byte or a cold drafter."""
    path = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), "--quick", "--json", str(path), *options],
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_cost_fits_a_line_to_each_method(tmp_path: Path) -> None:
    result = quick("cost", tmp_path, "--backends", "mooncake", "--repeats", "2")
    ways = {"channel", "unchecked"}
    methods = {*ways, *(f"{way}, whole" for way in ways), "bare"}
    lines = {(r["direction"], r["layout"], r["method"]) for r in result["parts"]["lines"]}
    assert lines == {
        (direction, layout, method)
        for direction in ("2 to 1", "1 to 2") for layout in ("runs", "random")
        for method in methods
    }  # fmt: skip
    assert len(result["parts"]["cells"]) == 3 * len(lines)
    assert {r["bytes"] for r in result["parts"]["cells"]} == {2**18, 2**19, 2**20}
    assert len(result["checks"]) == 2 * 4


def test_cost_notices_a_wrong_byte(tmp_path: Path) -> None:
    """The comparison itself can fail: with a channel that packs other rows."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(BENCH)!r})\n"
        "import rings\n"
        "from sglang_mixkv.prefill.outbox import Pages\n"
        "real = Pages.rows\n"
        "Pages.rows = lambda self, offset, count: real(self, offset, count) ^ 1\n"
        "rings.load_sglang()\n"
        "with rings.rings(('channel',), 1, 1, 'mooncake', 64) as made:\n"
        "    made['channel'].check(64, 'random')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "wrong bytes" in done.stderr


def test_overhead_meters_each_way(tmp_path: Path) -> None:
    result = quick("overhead", tmp_path, "--parts", "calls")
    both = {(r["side"], r["way"]) for r in result["parts"]["calls"]}
    assert both == {(s, w) for s in ("prefill", "decode") for w in ("stock", "channel")}
    assert {r["way"] for r in result["parts"]["added"]} == {"channel"}
    assert {c["target"] for c in result["checks"]} == {60.0, 40.0, 4.0}


@pytest.mark.full
def test_overhead_counts_what_is_left_beside_the_channel(tmp_path: Path) -> None:
    records = quick("overhead", tmp_path, "--parts", "beside")["parts"]["beside"]
    assert {r["thread"] for r in records} == {"python", "torch"}
    assert {r["backend"] for r in records} == {"-", "mooncake", "nixl"}
    assert all(r["left"] > 0 for r in records)


@pytest.mark.full
@START_TIMEOUT
def test_pairs_take_turns(tmp_path: Path) -> None:
    parts = quick("pairs", tmp_path, "--sizes", "2-1")["parts"]
    ways = ["stock", "channel"]
    *both, difference = parts["pairs"]
    assert [r["way"] for r in both] == ways
    assert [r["accept_length"] > 3.3 for r in both] == [False, True]
    assert difference["other_outputs"] == 0
    assert sorted(r["way"] for r in parts["servers"]) == sorted(ways)
    assert all(r["prefill_mib"] > 100 for r in parts["servers"])
    assert len(parts["ranks"]) == 4


@pytest.mark.full
@START_TIMEOUT
def test_cold_measures_each_way(tmp_path: Path) -> None:
    picture = tmp_path / "cold.svg"
    parts = quick("cold", tmp_path, "--repeats", "2", "--svg", str(picture))["parts"]
    assert [r["prompt_tokens"] for r in parts["by prompt length"]] == [32, 128]
    assert all(r["warm"] > 3 and r["cold"] < 1.3 for r in parts["by prompt length"])
    growing = parts["by tokens generated"]
    assert [r["to_token"] for r in growing] == [16, 32, 64, 96, 128, 160, 16, 32]
    assert [r["warm"] for r in growing] == pytest.approx([r["single"] for r in growing], rel=0.1)
    assert all(r["warm"] > 3 and r["cold"] < 1.3 for r in growing if r["to_token"] <= 16)
    assert "cold drafter, DFLASH" in picture.read_text()
