"""`scripts/gpu-check.sh` passes with correct kernels and detects wrong ones, in Triton's
interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import check
from .conftest import no_cuda

ROOT = Path(__file__).parents[2]
START = """
import ctypes, sys
from gpu import check
from rig.channel.fake_cuda import FakeCuda
from sglang_mixkv.draft.kernels import MODES
run = FakeCuda._interpret
few = "EAGLE3, fp8", "K wider than V"  # with pages of 1 and of 16
"""
CHOOSE = "check.LAYOUTS = [one for one in check.LAYOUTS if one.name in few]\n"
END = "sys.exit(check.main(sys.argv[1:]))"
WRONG = """
def wrong(kernel, constants, grid, values):
    words = [ctypes.cast(value, ctypes.POINTER(ctypes.c_int64)) for value in values[:3]]
    mode, mine = MODES[constants["MODE"]], constants["PAGE"] == 16 and grid[2] > 1
    run(kernel, constants, grid, values)
    %s
FakeCuda._interpret = staticmethod(wrong)
"""
IN_SLOT = (
    'if mine and mode == "pack": ctypes.c_uint8.from_address(words[0][8] * 16 + 64).value ^= 1'
)
IN_POOL = 'if mine and mode == "unpack": ctypes.c_uint8.from_address(words[1][0] * 16).value ^= 1'
VERDICT = 'if mine and mode == "settle": words[2][3] = 1'
KERNEL = 'assert constants["PAGE"] != 16 or mode != "clear"'


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", START + code + END, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_the_check_passes_in_each_layout(tmp_path: Path) -> None:
    done = run("", "--json", tmp_path / "check.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nall lines are correct\n")
    found = json.loads((tmp_path / "check.json").read_text())
    names = {row["name"] for row in found["rows"]}
    steps = ("kernels", "pack", "unpack", "clear")
    assert names >= {f"{one.name}: {step}" for one in check.LAYOUTS for step in steps}
    (unpack,) = (row for row in found["rows"] if row["name"] == "EAGLE3: unpack")
    assert unpack["figures"].keys() >= {"alone/1", "launches", "python", "0.3.0/H100"}
    assert found["ok"]


@pytest.mark.parametrize(
    ("mistake", "name", "words"),
    [
        (IN_SLOT, "pack", "slot 1: 1 of "),
        (IN_POOL, "unpack", "its bytes are wrong"),
        (VERDICT, "unpack", "slot 3: expected OK, got STALE"),
        (KERNEL, "kernels", "CudaError"),
    ],
    ids=["a byte of a slot", "a byte of a row", "a verdict", "a kernel"],
)
def test_a_wrong_byte_verdict_or_kernel_is_reported(mistake: str, name: str, words: str) -> None:
    done = run(CHOOSE + WRONG % mistake)
    assert done.returncode == 1, done.stdout + done.stderr
    line, *others = (line for line in done.stdout.splitlines() if line.startswith("!!"))
    assert line.startswith(f"!! K wider than V: {name} ")
    assert words in line
    assert len(others) == (name == "pack"), "a slot that was packed wrongly must not unpack"


def test_the_figures_of_the_earlier_release_are_read() -> None:
    found = check.earlier(check.EARLIER.read_text())
    assert found["EAGLE3, bf16, 8 of 8 heads, pages of 64"] == {"pack": 206.7, "unpack": 169.9}
    assert {one.earlier for one in check.LAYOUTS} - {""} <= found.keys()


def test_without_a_gpu_the_check_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    if not no_cuda():
        pytest.skip("there is a GPU")
    assert check.main([]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err
