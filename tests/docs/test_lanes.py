"""scripts/test.sh runs every part of the tests, and fails if one of them fails.

A program in place of Python records each run of pytest, fails as the test asks, and ends on Ctrl-C
with status 2, as pytest does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PURE, RINGS = "tests/pure tests/docs tests/sim tests/gpu", "tests/protocol tests/e2e"
PYTHON = """\
import os, signal, sys, time
def end(*_):
    sys.exit(2)
signal.signal(signal.SIGINT, end)
if sys.argv[1:3] != ["-m", "pytest"]:
    sys.exit(print("3.11"))
release = os.environ.get("MIXKV_SGLANG", "newest")
run = f"{release} {' '.join(sys.argv[3:5])}"
with open("runs", "a") as runs:
    print(release, *sys.argv[3:], file=runs)
print("begin", run, flush=True)
if os.environ["WAITS"] and run.startswith(os.environ["WAITS"]):
    time.sleep(60)
print("end", run, flush=True)
failing, _, code = os.environ["FAILS"].rpartition(" ")
sys.exit(int(code) if failing and run.startswith(failing) else 0)
"""
ALL = [f"newest {PURE}", f"newest {RINGS}", f"0.5.21 {PURE} -k", f"0.5.21 {RINGS} -k"]
ENV = 'MIXKV_ROOT="$PWD"; export PATH="$PWD/bin:$PATH"; [ -z "${MIXKV_SGLANG:-}" ] || touch older'


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Return a function that starts test.sh on a machine with so many cores."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    bodies = {"env": ENV, "optional": "mixkv_prometheus() { :; }\nmixkv_dynamo() { :; }"}
    for name, body in bodies.items():
        (tmp_path / "scripts" / f"{name}.sh").write_text(body + "\n")
    programs = {"python": f"#!{sys.executable}\n{PYTHON}", "nproc": '#!/bin/sh\necho "$CORES"\n'}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*args: str, cores: int = 2, fails: str = "", waits: str = "") -> subprocess.Popen[str]:
        own = {"PYTHON", "MIXKV_SGLANG"}
        inherited = {name: value for name, value in os.environ.items() if name not in own}
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        more = {"PATH": path, "CORES": str(cores), "FAILS": fails, "WAITS": waits}
        return subprocess.Popen(
            ["bash", "scripts/test.sh", *args], cwd=tmp_path, env=inherited | more, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    ("fails", "status"),
    [("", 0), *((f"{run.removesuffix(' -k')[:19]} 1", 1) for run in ALL), ("0.5.21 5", 0)],
)
def test_every_part_runs_and_counts(
    start: Any, tmp_path: Path, cores: int, fails: str, status: int
) -> None:
    """`fails`: the start of a run, and its exit status; 5 means that no test was selected."""
    process = start(cores=cores, fails=fails)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    runs = (tmp_path / "runs").read_text().splitlines()
    assert sorted(run.partition("-k")[0].strip() for run in runs) == sorted(
        run.removesuffix(" -k") for run in ALL
    )
    assert output.count("meanwhile") == (2 if cores > 1 else 0)
    for run in runs:
        assert output.count(f"end {' '.join(run.split()[:3])}\n") == 1


def test_options_run_in_sequence_on_this_release_alone(start: Any, tmp_path: Path) -> None:
    process = start("-x", "tests/none", fails="newest tests/protocol 1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    runs = (tmp_path / "runs").read_text().splitlines()
    assert runs == [f"newest {part} -x tests/none" for part in (PURE, RINGS)]
    assert not (tmp_path / "older").exists()


@pytest.mark.parametrize("waits", ["newest tests/pure", "newest tests/protocol", "0.5.21"])
def test_ctrl_c_ends_all_parts(start: Any, waits: str) -> None:
    process = start(waits=waits)
    begun(process, waits)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert remaining(process) == []


def test_a_signal_to_the_script_ends_the_part_in_the_background(start: Any) -> None:
    process = start(waits="newest tests/protocol")
    begun(process, "newest tests/protocol")
    process.terminate()
    process.communicate(timeout=30)
    assert remaining(process) == []


def begun(process: subprocess.Popen[str], run: str) -> None:
    """Wait until a run has begun. One in the background prints nothing yet, so wait for the last
    part beside it."""
    run = run.replace("newest tests/protocol", "0.5.21 tests/protocol")
    text = ""
    while f"begin {run}" not in text:
        line = process.stdout.readline()
        assert line, text
        text += line


def remaining(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of a session that have not ended after some time."""
    until = time.monotonic() + 10
    while (found := _members(process.pid)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _members(session: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(name)) == session:
                found.append(int(name))
    return found
