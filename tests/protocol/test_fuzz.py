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

SECONDS = 3.0


def short_run(
    name: str, seconds: float, seed: int, before: Callable[[], None] = lambda: None
) -> tuple[int, bytes, str]:
    """`fuzz.short` in a fork of this process, which has SGLang imported already."""

    def child(pipe: Any) -> None:
        before()
        pipe.send(fuzz.unguided(name, seed, seconds=seconds))

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


def yes(*_: Any, **__: Any) -> bool:
    return True


def fails(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


# Target, what is replaced, by what, and what is then found.
GUARDS = [
    ("gate-plain", "prefill.peers:Peers.note_unread", nothing, "are outside what"),
    ("gate-plain", "prefill.peer:Peer.check_metadata", nothing, "are outside what"),
    ("gate-no-draft", "prefill.peer:Peer.check_metadata", nothing, "are outside what"),
    ("gate-plain", "prefill.rank:PrefillRank.check_still_fits", nothing, "are outside what"),
    ("gate-plain", "prefill.rooms:Room.may_join", yes, "of a bystander"),
    ("gate-plain", "prefill.rooms:Rooms.close", nothing, "have a sender"),
    ("gate-plain", "prefill.rank:PrefillRank._count", fails, "an error that it did not expect"),
    ("gate-decode", "decode.gate:Gate._status", yes, "a room of others"),
    ("gate-decode", "decode.landing:Landing.scatter", fails, "an error that it did not expect"),
]


@pytest.mark.parametrize(("name", "guard", "instead", "words"), GUARDS)
def test_without_a_guard_it_is_found(
    name: str, guard: str, instead: Callable[..., Any], words: str
) -> None:
    def replace() -> None:
        module, _, path = guard.partition(":")
        owner: Any = importlib.import_module(f"sglang_mixkv.{module}")
        *classes, last = path.split(".")
        for one in classes:
            owner = getattr(owner, one)
        setattr(owner, last, instead)

    _, _, error = short_run(name, 120, 1, replace)
    assert words in error
