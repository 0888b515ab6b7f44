"""Many clients at once, some of whom hang up, and servers that are killed in the middle of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(1200), pytest.mark.full]

LOAD = Path(__file__).parents[2] / "scripts" / "faults" / "load.py"
PAIRS = [("--tp 2", "--tp 1"), ("--tp 1", "--tp 2"), ("--tp 2", "--tp 2 --attn-dp-size 2")]
PATIENCE = {"SGLANG_MIXKV_PATIENCE": "5"}


def load(folder: Path, pair: tuple[str, str], backend: str, *flags: str) -> dict[str, Any]:
    out, (prefill, decode) = folder / "load.json", pair
    about = [f"--prefill={prefill}", f"--decode={decode}", f"--backend={backend}", f"--json={out}"]
    command = [sys.executable, str(LOAD), *about, "--requests=90", "--rounds=1", *flags]
    env = {**os.environ, **PATIENCE}
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rounds: dict[str, Any] = json.loads(out.read_text())
    assert rounds["round 1"]["ended"]["hung up"] > 0
    return rounds


@pytest.mark.parametrize(
    ("pair", "backend"), [(PAIRS[0], "mooncake"), (PAIRS[1], "nixl"), (PAIRS[2], "mooncake")]
)
def test_nobody_pays_for_another(pair: tuple[str, str], backend: str, tmp_path: Path) -> None:
    rooms = load(tmp_path, pair, backend)["round 1"]["rooms"]
    assert rooms["channel_warm"] > 0
    assert rooms.get("channel_cold", 0) <= 0.01 * rooms["channel_warm"]


@pytest.mark.parametrize(
    ("pair", "backend"), [(PAIRS[0], "nixl"), (PAIRS[1], "mooncake"), (PAIRS[2], "nixl")]
)
def test_nor_for_a_server_that_dies(pair: tuple[str, str], backend: str, tmp_path: Path) -> None:
    """Half of the time is the wait for what a killed server's requests leave."""
    rounds = load(tmp_path, pair, backend, "--kill")
    assert [*rounds] == ["round 1", "decode killed", "prefill killed"]
    assert sum(r["ended"]["failed as their server was killed"] for r in [*rounds.values()][1:]) > 0
