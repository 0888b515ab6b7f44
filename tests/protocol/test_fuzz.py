"""The fuzzer's targets that set up a whole rank: none finds anything in the recorded messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz" / "fuzz.py"
TARGETS = ["gate-plain", "gate-hybrid", "gate-no-draft", "gate-cold", "gate-decode"]


@pytest.mark.parametrize(
    "target", [TARGETS[0], *(pytest.param(name, marks=pytest.mark.full) for name in TARGETS[1:])]
)
def test_recorded_messages_are_no_finding(target: str, tmp_path: Path) -> None:
    call = [sys.executable, str(FUZZ), "replay", target, "--folder", str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
