"""The benchmarks run and write all their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import START_TIMEOUT

pytestmark = [START_TIMEOUT, pytest.mark.full]

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def quick(name: str, folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Run a benchmark quickly, and return its figures. It raises if a byte is wrong or a drafter is
    cold."""
    path = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), "--quick", "--json", str(path), *options],
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Quick run: its figures mean nothing" in done.stdout
    parts: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["parts"]
    return parts


def test_the_rings_benchmarks_write_their_figures(tmp_path: Path) -> None:
    parts = quick("cost", tmp_path, "--repeats", "2")
    assert len({(line["direction"], line["layout"]) for line in parts["lines"]}) == 4
    assert [one["side"] for one in parts["scheduler"]] == ["prefill", "decode"]
    assert all(one["stock us"] > 0 for one in parts["scheduler"])


def test_the_channel_is_compared_with_sglang(tmp_path: Path) -> None:
    """The TP sizes are equal, and the channel's descriptors are counted over both backends."""
    for backend, rows in quick("beside_stock", tmp_path).items():
        assert {row["pages"] for row in rows} == {"runs", "random"}, backend
        for row in rows:
            assert row["descriptors: channel"] == 1, backend  # 1,024 tokens fit a slot
            assert row["bytes: channel"] > 0


def test_the_channels_benchmark_writes_its_figures(tmp_path: Path) -> None:
    parts = quick("channel", tmp_path)
    assert all(one["decode us per slot"] > 0 for one in parts["control plane"])
    assert all(one["p50 ms"] > 0 for one in parts["readers"])


def test_the_first_token_is_compared_with_sglang(tmp_path: Path) -> None:
    """Every part of the wait has a figure, and both sides count each of the concurrent requests."""
    parts = quick("first_token", tmp_path)
    assert {row[""] for row in parts["crowd"]} == {"first token", "whole answer"}
    assert all(row["p50"] <= row["p99"] for row in parts["waits"])
    assert all(row["128 tokens, ms"] > 0 for row in parts["parts"])
    assert {"pack", "read", "unpack", "poll"} <= {row["part"] for row in parts["parts"]}
