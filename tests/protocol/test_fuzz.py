"""The fuzzer's targets that set up a whole rank: the recorded messages and a few seconds of
mutations, other ones with every run, are no finding; with a guard less there is one."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "fuzz"))
fuzz = importlib.import_module("fuzz")

SECONDS = 4.0


def short_run(
    name: str, seconds: float, seed: int, before: Callable[[], None] = lambda: None
) -> tuple[int, bytes, str]:
    """`fuzz.short` in a fork of this process, which has SGLang imported already."""

    def child(pipe: Any) -> None:
        before()
        pipe.send(fuzz.short(name, seconds, seed))

    context = mp.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("name", fuzz.WITH_SGLANG)
def test_a_short_run_finds_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = secrets.randbits(32)
    count, data, error = short_run(name, SECONDS, seed)
    with capsys.disabled():
        print(f"\n{name}: {count} inputs, seed {seed}")
    if error:
        found = tmp_path / "finding"
        found.write_bytes(data)
        pytest.fail(f"seed {seed}, {found}, {data!r}:\n{error}")
    assert count > len(fuzz.recorded_for(name))


def nothing(*_: Any, **__: Any) -> None:
    return None


# Target, what is left out, what is then found.
GUARDS = [
    ("gate-plain", "prefill.peers:Peers.note_unread", "are outside what"),
    ("gate-plain", "prefill.peer:Peer.check_metadata", "are outside what"),
    ("gate-no-draft", "prefill.peer:Peer.check_metadata", "are outside what"),
    ("gate-plain", "prefill.rank:PrefillRank._check_still_fits", "are outside what"),
    ("gate-plain", "prefill.rooms:Rooms.close", "have a sender"),
    ("gate-decode", "decode.gate:Gate._status", "a room of others"),
]


@pytest.mark.parametrize(("name", "guard", "words"), GUARDS)
def test_without_a_guard_it_is_found(name: str, guard: str, words: str) -> None:
    def leave_out() -> None:
        module, _, path = guard.partition(":")
        owner: Any = importlib.import_module(f"sglang_mixkv.{module}")
        *classes, last = path.split(".")
        for one in classes:
            owner = getattr(owner, one)
        setattr(owner, last, nothing)

    _, _, error = short_run(name, 30, 1, leave_out)
    assert words in error
