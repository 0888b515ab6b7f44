"""A short run of the fuzzer over every parser, and that it finds a parser with a guard less."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris has no wheel for this Python or system")

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz"
TARGETS = ("prefill", "decode", "extension", "registration", "announcement")
RUNS = 20_000

# Run as its own process: libFuzzer ends it. The module's name is set once it is instrumented.
WEAKENED = """
import importlib, pathlib, struct, sys
sys.path.insert(0, sys.argv[1])
import fuzz
name, folder, place, value = sys.argv[2:]
module, _, attribute = place.partition(":")
real = fuzz.target
def weakened(name):
    found = real(name)
    one = importlib.import_module("sglang_mixkv.protocol." + module)
    setattr(one, attribute, eval(value))
    return found
fuzz.target = weakened
fuzz.fuzz(name, pathlib.Path(folder), {runs}, 1)
"""

# Target, name in a module of protocol/, what stands there instead, what is then found.
GUARDS = [
    ("prefill", "frames:number", "lambda frame, what, **limits: int(frame)", "ValueError"),
    ("prefill", "frames:bounded", "lambda *limits: None", "IndexError"),
    ("decode", "frames:number", "lambda frame, what, **limits: int(frame or b'0')", "Error"),
    ("registration", "frames:words", "lambda frame, what, code: struct.unpack('Q', frame)",
     "unpack"),
    ("registration", "registration:MAX_ADDRESS", "1 << 70", "outside the address space"),
    ("extension", "extension:RecursionError", "ZeroDivisionError", "RecursionError"),
    ("announcement", "announcement:UnicodeDecodeError", "ZeroDivisionError", "UnicodeDecodeError"),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_run_finds_nothing(target: str, tmp_path: Path) -> None:
    command = [sys.executable, FUZZ / "fuzz.py", "fuzz", target, "--folder", tmp_path]
    result = subprocess.run([*command, f"--runs={RUNS}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"number_of_executed_units: {RUNS}" in result.stderr


@pytest.mark.parametrize(("target", "place", "value", "found"), GUARDS)
def test_without_a_guard_it_is_found(
    target: str, place: str, value: str, found: str, tmp_path: Path
) -> None:
    code = WEAKENED.format(runs=RUNS)
    result = subprocess.run(
        [sys.executable, "-c", code, FUZZ, target, tmp_path, place, value],
        capture_output=True, text=True,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert result.returncode != 0, output[-4000:]
    assert "Uncaught Python exception" in output
    assert re.search(found, output.partition("Uncaught Python exception")[2])
    assert list(tmp_path.glob(f"{target}-crash-*"))
