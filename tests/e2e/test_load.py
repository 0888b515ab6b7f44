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
UP, DOWN = ("--tp 2", "--tp 1"), ("--tp 1", "--tp 2")
TO_DP, DP = ("--tp 2", "--tp 2 --attn-dp-size 2"), ("--tp 2 --dp 2 --enable-dp-attention",) * 2
STAGES = ("--tp 1 --pp-size 2", "--tp 2")
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
    ("pair", "backend", "flags"),
    [
        (UP, "mooncake", ()), (DOWN, "nixl", ()), (TO_DP, "mooncake", ()), (DP, "nixl", ()),
        (STAGES, "mooncake", ("--pair=mla-dspark",)),
    ],
)  # fmt: skip
def test_nobody_pays_for_another(
    pair: tuple[str, str], backend: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Which the script decides: cold drafters, too, are somebody's trouble."""
    assert load(tmp_path, pair, backend, *flags)["round 1"]["rooms"]["warm"] > 0


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Of the second and third round, beside the first."""
    rounds = load(tmp_path, DOWN, "mooncake", "--memory", "--rounds=3")
    assert all(one["plugin's bytes"] > 1 << 17 for one in rounds["round 3"]["memory"].values())


@pytest.mark.parametrize(("pair", "backend"), [(UP, "nixl"), (DOWN, "mooncake"), (TO_DP, "nixl")])
def test_nor_for_a_server_that_dies(pair: tuple[str, str], backend: str, tmp_path: Path) -> None:
    """Half of the time is the wait for what a killed server's requests leave."""
    rounds = load(tmp_path, pair, backend, "--kill")
    assert [*rounds] == ["round 1", "decode killed", "prefill killed"]
    assert sum(r["ended"]["failed as their server was killed"] for r in [*rounds.values()][1:]) > 0
