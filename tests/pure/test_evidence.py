"""Rows of evidence, and the table of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rig import evidence

TABLE = Path(__file__).parents[2] / "scripts" / "faults" / "table.py"


def test_runs_of_one_test_are_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    monkeypatch.setenv(evidence.FILE_ENV, str(file))
    ends = [
        ("success", "warm", ""), ("success", "cold", "deadline"), ("failed", "", "after 3.1 s"),
        ("failed", "", "after 3.25 s"),
    ]  # fmt: skip
    for _ in range(2):
        touched = {**evidence.outcomes(ends), "slowest": 3.0}
        others = {**evidence.outcomes(ends[:1]), "slowest": 0.25}
        row = {"touched": touched, "others": others, "wrong": 0, "leaked": 1}
        evidence.publish({**row, "what": "it is stopped", "backend": "nixl"})
    long = lines_of(file)[2]
    assert long.startswith("| it is stopped | nixl | 2 | 2 warm, 2 cold, 4 failed | ")
    assert "4 failed: after N s; 2 cold: deadline | 2 warm | 0.25 s | 0 | 2 | `" in long
    assert len(lines_of(file)) == 3
    name = "runs of one test are one row"
    short = f"| {name} | 0, 2 | 2, 2, 4 | 2, 0, 0 | 0.25 s |"
    evidence.publish({**row, "what": "it is stopped", "backend": "nixl alone"})
    stock = f"| {name}, stock | 0, 1 | 1, 1, 2 | 1, 0, 0 | 0.25 s |"
    assert lines_of(file, "--short")[2:] == [short, stock, "", "In all: 0 wrong, 3 leaked."]


def lines_of(file: Path, *options: str) -> list[str]:
    command = [sys.executable, str(TABLE), str(file), *options]
    done = subprocess.run(command, text=True, check=True, capture_output=True)
    return done.stdout.splitlines()
