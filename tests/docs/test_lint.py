"""Every hook of .pre-commit-config.yaml passes on all files, so that CI sees what a commit sees."""

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
PACKAGES = ("sglang_mixkv", "mixkv_cpu", "mixkv_demo")
FOLDERS = (*PACKAGES, "docker", "docs", "examples", "scripts", "tests", ".ci")


def files_of(kinds: list[str]) -> list[str]:
    """All files of these kinds, as pre-commit would pass them."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    return [str(path.relative_to(ROOT)) for path in found if path.is_file() and kind(path) in kinds]


def kind(path: Path) -> str:
    if path.suffix in (".py", ".sh"):
        return {".py": "python", ".sh": "shell"}[path.suffix]
    if path.suffix:
        return ""
    with path.open("rb") as stream:
        first = stream.readline()
    return "shell" if first.startswith(b"#!") and first.rstrip().endswith(b"bash") else ""


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_hook_passes_on_all_files(hook: dict[str, Any]) -> None:
    command = shlex.split(hook["entry"])
    if hook.get("pass_filenames", True):
        files = files_of(hook.get("types") or hook["types_or"])
        assert files
        command += files
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_scripts_are_found() -> None:
    found = files_of(["shell"])
    assert {".ci/run", "scripts/test.sh", "scripts/launch/common.sh"} <= set(found)
