"""The benchmarks run, find a wrong byte, and write every figure."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def quick(name: str, folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """The figures of a quick run. It raises of itself at a wrong byte or a cold drafter."""
    path = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), "--quick", "--json", str(path), *options],
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Quick run: its figures mean nothing" in done.stdout
    parts: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["parts"]
    return parts


def test_cost_fits_a_line_to_each_way(tmp_path: Path) -> None:
    parts = quick("cost", tmp_path, "--repeats", "2")
    lines = {(r["direction"], r["layout"], r["method"]) for r in parts["lines"]}
    assert lines == {
        (direction, layout, method)
        for direction in ("2 to 1", "1 to 2") for layout in ("runs", "random")
        for method in ("channel", "bare")
    }  # fmt: skip
    assert [r["MiB"] for r in parts["medians"]] == 4 * [0.25, 0.5, 1]


def test_cost_notices_a_wrong_byte(tmp_path: Path) -> None:
    """The comparison itself can fail: with a channel that packs other rows."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(BENCH)!r})\n"
        "import rings\n"
        "from sglang_mixkv.prefill.worker import Pages\n"
        "real = Pages.rows\n"
        "Pages.rows = lambda self, offset, count: real(self, offset, count) ^ 1\n"
        "rings.load_sglang()\n"
        "with rings.rings(('channel',), 1, 1, 64) as made:\n"
        "    made['channel'].check(64, 'random')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "wrong bytes" in done.stderr


def test_a_line_and_its_interval_are_found_in_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of noise that grows with time: the small sizes say what a is."""
    monkeypatch.syspath_prepend(str(BENCH))
    common = importlib.import_module("common")
    rng = np.random.default_rng(3)
    seconds = {
        size: (1e-3 + 1e-9 * size) * rng.normal(1, 0.1, 15)
        for size in (64 << 12 << step for step in range(10))
    }
    a, b = common.line(seconds)
    assert a == pytest.approx(1e-3, rel=0.15)
    assert b == pytest.approx(1e-9, rel=0.1)
    low, high = common.interval(np.median, rng.normal(5, 1, 400))
    assert 4.7 < low < 5 < high < 5.3


def test_every_call_of_the_scheduler_is_metered(tmp_path: Path) -> None:
    found = quick("scheduler", tmp_path)["scheduler"]
    assert {r["side"] for r in found if r["call"] == "request"} == {"prefill", "decode"}
    assert all(r["stock us"] > 0 for r in found)


def test_peers_are_counted(tmp_path: Path) -> None:
    found = quick("peers", tmp_path)["peers"]
    assert [(r["side"], r["peers"]) for r in found] == [
        ("decode", 1), ("decode", 20), ("prefill", 1), ("prefill", 20),
    ]  # fmt: skip
