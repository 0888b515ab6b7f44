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

from sglang_mixkv.channel import data_plane, messages, slots
from sglang_mixkv.decode import parts, servers
from sglang_mixkv.prefill import packing, rooms, waiting

asking = pytest.importorskip("sglang_mixkv.engine.asking")  # needs aiohttp

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz"
TARGETS = ("message", "row", "endpoint", "prefill", "decode")
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
    patch(servers, "readers_of", lambda prefill, decode: max(1, decode // prefill))


@guard("row", "heads that nobody reads")
def instances_of_ranks(patch: Patch) -> None:
    patch(servers, "_check_instances", lambda instances: None)


@guard("endpoint", "RecursionError")
def depth_of_endpoints(patch: Patch) -> None:
    patch(data_plane, "RecursionError", ZeroDivisionError, raising=False)


@guard("endpoint", "outside the peer's memory")
def memory_of_a_peer(patch: Patch) -> None:
    patch(data_plane.Memory, "holds", lambda self, address, length: True)


@guard("prefill", "too much waits")
def bound_of_what_waits(patch: Patch) -> None:
    patch(waiting.Places, "is_full", lambda self, connection: False)


@guard("prefill", "not its own")
def stamps_of_acks(patch: Patch) -> None:
    def acknowledge(self: slots.SlotPool, slot: int, stamp: int) -> bool:
        if slot in self._offered:
            self.free(slot)
            return True
        return False

    patch(slots.SlotPool, "acknowledge", acknowledge)


@guard("prefill", "parts")
def generations_of_parts(patch: Patch) -> None:
    class Blind(dict):
        def __contains__(self, key: object) -> bool:
            return False

    real = rooms.Rooms.__init__

    def init(self: rooms.Rooms, *args: object) -> None:
        real(self, *args)
        self._parts = Blind()

    patch(rooms.Rooms, "__init__", init)


@guard("prefill", "heads of another rank")
def heads_that_are_wanted(patch: Patch) -> None:
    patch(rooms, "refusal", lambda *_: None)


@guard("prefill", "more than a slot")
def tokens_that_fit(patch: Patch) -> None:
    patch(packing.Packing, "fits", lambda self, opened: True)


@guard("prefill", "left: |not served")
def slots_without_an_ack(patch: Patch) -> None:
    patch(slots.SlotPool, "expire", lambda self, now: [])


@guard("prefill", "left: ")
def rooms_without_a_request(patch: Patch) -> None:
    patch(waiting.Queue, "take_older", lambda self, limit: [])


@guard("decode", "slot|rows")
def all_of_ready(patch: Patch) -> None:
    patch(parts.Part, "violation", lambda self, ready, end: "")


@guard("decode", "outside the slots")
def slot_of_ready(patch: Patch) -> None:
    real = parts.Part.violation
    patch(
        parts.Part, "violation",
        lambda self, ready, end: "" if ready.slot > 7 else real(self, ready, end),
    )  # fmt: skip


@guard("decode", "rows outside the room")
def end_of_the_prompt(patch: Patch) -> None:
    real = parts.Part.violation
    patch(parts.Part, "violation", lambda self, ready, end: real(self, ready, 1 << 40))


@guard("decode", "not sent")
def peer_of_a_part(patch: Patch) -> None:
    class Anybody(dict):
        def get(self, peer: bytes) -> object:
            return next(iter(self.values()), None)

    real = parts.Room.__init__

    def init(self: parts.Room, *args: object) -> None:
        real(self, *args)
        self.parts = Anybody(self.parts)

    patch(parts.Room, "__init__", init)


@guard("decode", "KeyError|rows")
def rooms_that_are_over(patch: Patch) -> None:
    patch(parts.Room, "wants", True)


@pytest.mark.parametrize("target", TARGETS)
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


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_run_of_libfuzzer_finds_nothing(target: str, tmp_path: Path) -> None:
    """As its own process, which libFuzzer ends."""
    pytest.importorskip("atheris", reason="atheris has no wheel for this Python or system")
    command = [sys.executable, FUZZ / "fuzz.py", target, "--folder", tmp_path, f"--runs={RUNS}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"number_of_executed_units: {RUNS}" in result.stderr
