"""Short runs of the fuzzer find nothing in the package, but do find a fault without a guard."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_mixkv.channel import data_plane, messages
from sglang_mixkv.decode import plan

prefill_http = pytest.importorskip("sglang_mixkv.engine.prefill_http")  # needs aiohttp

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz"
RUNS, UNTIL_FOUND = 1_500, 20_000

sys.path.insert(0, str(FUZZ))
fuzz = importlib.import_module("fuzz")

NO_ERROR = {"name": "RecursionError", "value": ZeroDivisionError, "raising": False}
GUARDS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "depth of messages": ("message", "RecursionError", messages,
                          {"name": "decode", "value": messages._decoder.decode}),
    "types of messages": ("message", "AssertionError", messages,
                          {"name": "_decoder", "value": msgspec.msgpack.Decoder()}),
    "depth of answers": ("row", "RecursionError", prefill_http, NO_ERROR),
    "sizes of zero": ("row", "ZeroDivisionError", plan,
                      {"name": "readers_of", "value": lambda p, d: max(1, d // p)}),
    "instances of ranks": ("row", "heads that nobody reads", plan,
                           {"name": "_check_unique", "value": lambda rows: None}),
    "depth of endpoints": ("endpoint", "RecursionError", data_plane, NO_ERROR),
    "memory of a peer": ("endpoint", "outside the peer's memory", data_plane.DataPlane,
                         {"name": "_are_inside", "value": lambda self, peer, extents: True}),
}  # fmt: skip
"""By guard: the fuzz target, the fault without the guard, the guard's owner and replacement."""


@pytest.mark.parametrize("guard", GUARDS)
def test_the_fuzzer_finds_a_removed_guard(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, found, owner, change = GUARDS[guard]
    assert fuzz.fuzz(target, 1, RUNS) == (b"", "")
    monkeypatch.setattr(owner, **change)
    _, trace = fuzz.fuzz(target, 1, UNTIL_FOUND)
    assert re.search(found, trace.strip().rpartition("\n")[2]), trace
