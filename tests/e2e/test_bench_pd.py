"""bench_pd.py --demo from its command line to its files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import START_TIMEOUT

pytestmark = [START_TIMEOUT, pytest.mark.full]

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_pd.py"
PROMPTS = 4


def test_demo_measures_mixkv_against_equal_sizes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--demo", "--variants", "none,mixkv",
         "--num-prompts", str(PROMPTS), "--into", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["P1->D1 stock", "P2->D1 none", "P2->D1 mixkv"]
    for row in rows:
        found = row["figures"]
        assert (found["completed"], found["failed"]) == (PROMPTS, 0)
        assert 0 < found["transfer_share"] < 1
        assert found["output_digest"] == rows[0]["figures"]["output_digest"]
    assert rows[1]["figures"]["accept_length"] is None
    assert rows[2]["figures"]["accept_length"] > 3.3
    assert "P2->D1 mixkv" in (tmp_path / "table.md").read_text()
    assert len((tmp_path / "bench_serving.jsonl").read_text().splitlines()) == len(rows)
