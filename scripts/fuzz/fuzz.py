"""Fuzz what parses a peer's bytes.

    fuzz.py --runs N --folder FOLDER    libFuzzer, through atheris
    fuzz.py --runs N                    mutations of the seeds, without its guidance

One parser after the other, or those that are named. An input is one document; most mutations keep
its structure. libFuzzer keeps what reaches new code in FOLDER/PARSER, and ends with status 77 and
the input in a file at the first error, hang or excess of memory. What a peer can do to the state
machines is a matter of tests/sim.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

TARGETS = ("message", "row", "endpoint")
TIMEOUT_S, RSS_MB, MAX_LEN = 10, 2048, 16 << 10
VALUES: tuple[Any, ...] = (
    0, 1, -1, 7, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, None, True,
    0.5, "", "x" * 600, "\0", b"", b"another_", [], {},
)  # fmt: skip
DEEP = 3_000
ODD = {  # what no encoder writes
    msgspec.msgpack: (b"\x91" * DEEP + b"\x01", b"\xa1\xff", b"\xdd\x7f\xff\xff\xff", b"\xc1"),
    msgspec.json: (b"[" * DEEP + b"]" * DEEP, b'"\xff"', b'"\\ud800"', b"9" * 400, b"NaN"),
}
Mutate = Callable[[bytes, int], bytes]  # libFuzzer's, of bytes; its second argument is a limit


def change(form: Any, data: bytes, change_bytes: Mutate, rng: random.Random) -> bytes:
    """One value changed, or some bytes. `form`: msgspec's module of the format."""
    try:
        changed: bytes = form.encode(_changed(form.decode(data), form, rng))
    except (ValueError, OverflowError, RecursionError, TypeError):
        changed = data
    return change_bytes(data, len(data) + 8) if changed == data or not rng.randrange(8) else changed


def _changed(value: Any, form: Any, rng: random.Random) -> Any:
    """`value` with one value inside it replaced, removed, added or doubled."""
    if not isinstance(value, list | dict) or not value or not rng.randrange(12):
        if isinstance(value, int) and rng.randrange(2):
            return value + rng.choice((-1, 1, 8, value, -2 * value))
        return msgspec.Raw(rng.choice(ODD[form])) if not rng.randrange(8) else rng.choice(VALUES)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    kind = rng.randrange(12)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value["x"] = msgspec.Raw(rng.choice(ODD[form]))
    elif kind == 1:
        value.append(rng.choice((value[key], msgspec.Raw(rng.choice(ODD[form])))))
    else:
        value[key] = _changed(value[key], form, rng)
    return value


def target(name: str) -> tuple[Callable[[bytes], None], Any, list[bytes]]:
    """What takes an input, what mutates one, and the seeds. Imports what it fuzzes."""
    sys.path.insert(0, str(Path(__file__).parent))
    parsers = importlib.import_module("parsers")
    form = msgspec.json if name == "row" else msgspec.msgpack
    return getattr(parsers, name), partial(change, form), parsers.SEEDS[name]


def fuzz(name: str, folder: Path, runs: int, seed: int) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["sglang_mixkv"]):
        one, mutated, seeds = target(name)
    corpus = folder / name
    corpus.mkdir(parents=True, exist_ok=True)
    for data in seeds:
        (corpus / f"seed-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)

    def custom(data: bytes, max_size: int, seed: int) -> bytes:
        # libFuzzer sees no branches inside msgspec's C and soon prefers inputs that fail early:
        # start over from a seed often enough.
        rng = random.Random(seed)
        start = data if rng.randrange(3) else rng.choice(seeds)
        return mutated(start, atheris.Mutate, rng)[:max_size]

    flags = [
        f"-runs={runs}", f"-seed={seed}", f"-timeout={TIMEOUT_S}", f"-max_len={MAX_LEN}",
        f"-rss_limit_mb={RSS_MB}", "-len_control=0", f"-artifact_prefix={folder}/{name}-",
        "-print_final_stats=1", "-verbosity=0",
    ]  # fmt: skip
    atheris.Setup([name, *flags, str(corpus)], one, custom_mutator=custom)
    atheris.Fuzz()


def unguided(name: str, seed: int, runs: int) -> tuple[bytes, str]:
    """The first finding, among the seeds and then their mutations: its input and traceback."""
    one, mutated, seeds = target(name)
    rng = random.Random(seed)
    for number in range(runs):
        data = seeds[number] if number < len(seeds) else rng.choice(seeds)
        for _ in range(rng.randrange(1, 7) if number >= len(seeds) else 0):
            data = mutated(data, partial(any_bytes, rng), rng)
        try:
            one(data)
        except BaseException:
            return data, traceback.format_exc()
    return b"", ""


def any_bytes(rng: random.Random, data: bytes, max_size: int) -> bytes:
    """In the place of libFuzzer's mutator: some bytes replaced, added or removed."""
    at = rng.randrange(len(data) + 1)
    added = rng.randbytes(rng.randrange(5))
    return (data[:at] + added + data[at + rng.randrange(5) :])[:max_size]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="PARSER", help=str(TARGETS))
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--folder", type=Path, help="of the corpora, for libFuzzer")
    args = parser.parse_args()
    seed = args.seed or random.randrange(1, 1 << 30)
    for name in args.targets:
        if args.folder is not None and len(args.targets) == 1:
            fuzz(name, args.folder, args.runs, seed)
        if args.folder is not None:  # a process each, since libFuzzer ends its own
            flags = [f"--runs={args.runs}", f"--seed={seed}", f"--folder={args.folder}"]
            subprocess.run([sys.executable, __file__, name, *flags], check=True)
            continue
        data, trace = unguided(name, seed, args.runs)
        print(f"{name}: {args.runs} inputs, seed {seed}: {trace or 'no finding'}")
        if trace:
            print(data)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
