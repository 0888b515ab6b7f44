"""Short runs of the fuzzer over every target, and that it finds a guard that is not there."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sglang_mixkv.channel import data_plane, messages
from sglang_mixkv.decode import plan

asking = pytest.importorskip("sglang_mixkv.engine.asking")  # needs aiohttp

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz"
RUNS, UNTIL_FOUND = 1_500, 20_000

sys.path.insert(0, str(FUZZ))
fuzz = importlib.import_module("fuzz")

Patch = Callable[..., None]  # pytest's `monkeypatch.setattr`
GUARDS: dict[Callable[[Patch], None], tuple[str, str]] = {}


def guard(target: str, found: str) -> Callable[[Callable[[Patch], None]], None]:
    def keep(without: Callable[[Patch], None]) -> None:
        GUARDS[without] = target, found

    return keep


@guard("message", "RecursionError")
def depth_of_messages(patch: Patch) -> None:
    patch(messages, "decode", messages._decoder.decode)


@guard("message", "AssertionError")
def types_of_messages(patch: Patch) -> None:
    patch(messages, "_decoder", msgspec.msgpack.Decoder())


@guard("row", "RecursionError")
def depth_of_answers(patch: Patch) -> None:
    patch(asking, "RecursionError", ZeroDivisionError, raising=False)


@guard("row", "ZeroDivisionError")
def sizes_of_zero(patch: Patch) -> None:
    patch(plan, "readers_of", lambda prefill, decode: max(1, decode // prefill))


@guard("row", "heads that nobody reads")
def instances_of_ranks(patch: Patch) -> None:
    patch(plan, "_check_instances", lambda instances: None)


@guard("endpoint", "RecursionError")
def depth_of_endpoints(patch: Patch) -> None:
    patch(data_plane, "RecursionError", ZeroDivisionError, raising=False)


@guard("endpoint", "outside the peer's memory")
def memory_of_a_peer(patch: Patch) -> None:
    patch(data_plane.DataPlane, "_are_inside", lambda self, peer, extents: True)


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_short_run_finds_nothing(target: str) -> None:
    assert fuzz.unguided(target, 1, RUNS) == (b"", "")


@pytest.mark.parametrize("without", GUARDS, ids=lambda without: without.__name__)
def test_without_a_guard_it_is_found(
    without: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, found = GUARDS[without]
    without(monkeypatch.setattr)
    _, trace = fuzz.unguided(target, 1, UNTIL_FOUND)
    assert re.search(found, trace.strip().rpartition("\n")[2]), trace


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_short_run_of_libfuzzer_finds_nothing(target: str, tmp_path: Path) -> None:
    """As its own process, which libFuzzer ends."""
    pytest.importorskip("atheris", reason="atheris has no wheel for this Python or system")
    command = [sys.executable, FUZZ / "fuzz.py", target, "--folder", tmp_path, f"--runs={RUNS}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"number_of_executed_units: {RUNS}" in result.stderr
