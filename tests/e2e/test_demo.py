"""Run the documented demo through its script, with a topology other than the default."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mixkv_demo.pair import ask, prompts

from .conftest import START_TIMEOUT

ROOT = Path(__file__).parents[2]
# scripts/env.sh chooses the folder in the same way.
SGLANG = "-{MIXKV_SGLANG}".format(**os.environ) if os.environ.get("MIXKV_SGLANG") else ""
VERSION = "-{}.{}".format(*sys.version_info) if os.environ.get("PYTHON") else ""
SCRIPTS_ENVIRONMENT = ROOT / f".venv{SGLANG}{VERSION}"
pytestmark = START_TIMEOUT


@pytest.mark.full
def test_the_documented_demo(tmp_path: Path) -> None:
    """The demo's table and figures show the single server's accept length with the plugin, and less
    than half of it without."""
    if Path(sys.prefix) != SCRIPTS_ENVIRONMENT:
        pytest.skip("scripts/demo.sh would set up another environment than this one")
    file = tmp_path / "figures.json"
    sizes = "--prefill=--tp 1", "--decode=--tp 2"
    command = ["bash", "scripts/demo.sh", *sizes, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(file.read_text())
    lengths = {run["name"]: run["accept_length"] for run in figures["runs"]}
    assert lengths["mixkv"] == pytest.approx(lengths["single"], rel=0.02)
    assert lengths["stock"] < 0.5 * lengths["single"]
    for name, length in lengths.items():
        assert re.search(rf"{name}\b.* {length:.3f} ", done.stdout), done.stdout


@pytest.mark.full
def test_one_deployment_serves_until_its_input_ends() -> None:
    command = [sys.executable, "-m", "mixkv_demo", "--serve", "single"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        said = json.loads(process.stdout.readline())
        (server,) = said["servers"]
        assert server["name"] == "server"
        assert ask(said["url"], prompts()[0]).tokens
        os.kill(server["pid"], 0)
        process.stdin.close()
        assert process.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(server["pid"], 0)
