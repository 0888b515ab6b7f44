"""Many clients at once, some of whom hang up, and servers that are killed in the middle of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rig.unserved import skip_unserved

from .conftest import START_TIMEOUT

pytestmark = [START_TIMEOUT, pytest.mark.full]

LOAD = Path(__file__).parents[2] / "scripts" / "faults" / "load.py"
DP = "--tp 2 --attn-dp-size 2"


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize(
    ("prefill", "decode"), [("--tp 2", "--tp 1"), ("--tp 1", "--tp 2"), ("--tp 2", DP)]
)
def test_nobody_pays_for_another(prefill: str, decode: str, backend: str, tmp_path: Path) -> None:
    skip_unserved(backend)
    out = tmp_path / "load.json"
    flags = [f"--prefill={prefill}", f"--decode={decode}", f"--backend={backend}", f"--json={out}"]
    command = [sys.executable, str(LOAD), *flags, "--requests=90", "--rounds=1", "--kill"]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = json.loads(out.read_text())
    assert [*rounds] == ["round 1", "decode killed", "prefill killed"]
    assert rounds["round 1"]["ended"]["hung up"] > 0
    assert sum(r["ended"]["failed as their server was killed"] for r in [*rounds.values()][1:]) > 0
