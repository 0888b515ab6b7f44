"""Every hook in .pre-commit-config.yaml passes on all files, so CI checks the same as a commit."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())[
    "repos"
][0]["hooks"]
SHELL = [
    ROOT / ".ci" / "run",
    *(p for f in ("scripts", "docker", "findings", "tests") for p in (ROOT / f).rglob("*.sh")),
]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_hook_passes_on_all_files(hook: dict[str, Any]) -> None:
    command = shlex.split(hook["entry"])
    if hook.get("pass_filenames", True):
        command += map(str, SHELL if hook.get("types") == ["shell"] else [ROOT])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
