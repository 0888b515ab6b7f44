"""The benchmarks run, find no wrong byte, and their results become tables."""

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
LIMIT_S = 300


def run(name: str, *options: str) -> str:
    """A script of the benchmarks, in a process of its own; its output."""
    command = [sys.executable, str(BENCH / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def quick(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The result of a quick run."""
    path = folder / f"{name}.json"
    output = run(f"{name}.py", "--quick", "--json", str(path), *options)
    assert "Quick run: its figures mean nothing" in output
    result: dict[str, Any] = json.loads(path.read_text())
    assert (result["bench"], result["quick"]) == (name, True)
    return result


def test_copies_are_right_and_reads_have_a_bare_one_beside_them(tmp_path: Path) -> None:
    """They raise of themselves on a wrong byte."""
    assert quick("copies", tmp_path)["parts"]
    assert quick("reads", tmp_path)["parts"]


def test_peers_are_counted_and_their_faults_pass(tmp_path: Path) -> None:
    parts = quick("peers", tmp_path, "--parts", "figures,faults")["parts"]
    assert [(one["side"], one["peers"]) for one in parts["figures"]] == [
        ("decode", 1), ("decode", 20), ("prefill", 1), ("prefill", 20),
    ]  # fmt: skip
    assert {one["side"] for one in parts["faults"]} == {"decode", "prefill"}
    assert all(one["rooms"] for one in parts["faults"])


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


def test_a_look_belongs_to_who_called_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    startup = importlib.import_module("startup")
    owners = {one: folder for folder, one in startup.OWNERS.items()}
    ours, theirs = f"hook ({owners['plugin']}/plugin.py:1)", f"run ({owners['SGLang']}/a.py:1)"
    importing, server = "_find_and_load (<frozen importlib._bootstrap>:1)", 'process 1:"python"'
    shares = startup.read(
        [
            f"{server};{theirs};{ours} 5",
            f"{server};{theirs};{ours};{importing} 1",
            f"{server};{ours};{theirs};{importing} 3",
            f"{server};{theirs};{ours};{importing};{theirs} 4",
            f"{server};{theirs};{ours};{importing};{ours};{importing} 2",
            f'{server};process 2:"python -c a;b";{theirs};{ours};{theirs} 2',
        ]
    )
    assert shares == {1: {"plugin": 8, "imports": 7}, 2: {"SGLang": 2}}


@pytest.mark.full
def test_a_start_is_watched() -> None:
    assert "| sglang::scheduler |" in run("startup.py")


def test_a_result_becomes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    render = importlib.import_module("render")
    check = {"name": "a figure", "target": 2.0, "value": 3.0, "at_most": True, "met": False}
    machine = {"cores": 2, "load_at_start": 0.5, "packages": {"numpy": "2", "torch": "3"}}
    record = {"layout": "random", "median": 0.00125, "bytes": 3 << 20, "samples": 7}
    records = [{**record, "shares": [0.9, 0.5], "other": None}]
    head = {"bench": "copies", "quick": False, "lacks": "", "machine": machine}
    text = render.markdown({**head, "checks": [check], "parts": {"rows": records, "none": []}})
    assert "| a figure | at most 2 | 3 | **no** |" in text
    assert "| layout | median, ms | MiB | shares | other |\n" in text
    assert "| random | 1.25 | 3 | 0.9, 0.5 |  |\n" in text
    assert "| packages | numpy 2, torch 3 |" in text
    assert "## none\n\nNot measured.\n" in text
