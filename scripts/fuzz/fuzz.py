"""The fuzzer behind run.sh.

    fuzz.py fuzz TARGET --runs N --folder FOLDER    libFuzzer, through atheris, on one target
    fuzz.py unguided TARGET --runs N --seed SEED    mutations alone: three times as many a second
    fuzz.py coverage --all --folder FOLDER          lines of the parsers that its corpora reach

libFuzzer mutates the seeds, keeps what reaches new code in FOLDER/TARGET, and ends with status
77 and the input in a file at the first error, hang or excess of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import logging
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from coverage import Coverage

HERE = Path(__file__).parent
TIMEOUT_S, RSS_MB, MAX_LEN = 10, 2048, 16 << 10

# Target -> its seeds. Of all inputs, a target of the second kind gets a hundredth of one of the
# first: it sets up a whole rank, and is slower by about as much.
PURE = {
    "prefill": "prefill",
    "decode": "decode",
    "extension": "prefill",
    "registration": "prefill",
    "announcement": "announcement",
}
WITH_SGLANG = {
    "gate-plain": "prefill",
    "gate-hybrid": "prefill",
    "gate-no-draft": "prefill",
    "gate-cold": "prefill",
    "gate-shared": "prefill",
    "gate-gqa": "prefill",
    "gate-decode": "decode",
}
WEIGHT = 100
ALL = PURE | WITH_SGLANG

INSTRUMENTED = [
    "sglang_mixkv",
    "sglang.srt.disaggregation.common",
    "sglang.srt.disaggregation.mooncake",
]

# What reads network input.
PARSERS = (
    "protocol/announcement.py",
    "protocol/extension.py",
    "protocol/frames.py",
    "protocol/messages.py",
    "protocol/registration.py",
)
PARSERS_WITH_SGLANG = (
    "decode/gate.py",
    "prefill/gate.py",
    "prefill/peer.py",
    "prefill/peers.py",
    "prefill/rooms.py",
)


def no_unpickling(event: str, _: tuple) -> None:
    if event == "pickle.find_class":
        raise AssertionError("something was unpickled")


def target(name: str) -> tuple[Callable[[bytes], None], Callable]:
    """The function that takes an input, and its mutator. Imports what it fuzzes."""
    sys.path.insert(0, str(HERE))
    if name in PURE:
        module = importlib.import_module("targets")
        one = getattr(module, name)
    else:
        module = importlib.import_module("managers")
        one = module.bench(name.removeprefix("gate-"))
    mutate = importlib.import_module("mutate")
    if name == "announcement":
        return one, mutate.mutate_json
    return one, partial(mutate.mutate, others=recorded_for(name))


def recorded_for(name: str) -> list[bytes]:
    """The recorded inputs of a target: of a rank's those of its own case, and of no case."""
    cases = {other.removeprefix("gate-") for other in WITH_SGLANG} - {name.removeprefix("gate-")}
    others = tuple(f"{case}{rank}-" for case in cases for rank in (0, 1))
    paths = sorted((HERE / "seeds" / ALL[name]).iterdir())
    apart = name in WITH_SGLANG and name != "gate-decode"
    recorded = importlib.import_module("mutate").recorded
    return [recorded(path) for path in paths if not (apart and path.name.startswith(others))]


def fuzz(name: str, folder: Path, runs: int, seed: int) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        one, mutate = target(name)
    logging.disable(logging.CRITICAL)
    sys.addaudithook(no_unpickling)
    flags = [
        f"-runs={runs}", f"-seed={seed}", f"-timeout={TIMEOUT_S}", f"-max_len={MAX_LEN}",
        f"-rss_limit_mb={RSS_MB + 4096 * (name in WITH_SGLANG)}", "-len_control=0",
        f"-artifact_prefix={folder}/{name}-", "-print_final_stats=1", "-verbosity=0",
    ]  # fmt: skip
    corpus, recorded = folder / name, HERE / "seeds" / ALL[name]
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = recorded_for(name)

    def custom(data: bytes, max_size: int, seed: int) -> bytes:
        # libFuzzer sees no branches inside msgspec's C and soon prefers inputs that fail early:
        # start over from a message that is right, often enough.
        rng = random.Random(seed)
        start = rng.choice(seeds) if rng.randrange(3) == 0 else data
        return mutate(start, atheris.Mutate, rng, max_size)

    def kept(data: bytes) -> None:
        # A rank's threads can end the process before libFuzzer has written the input down.
        try:
            one(data)
        except BaseException:
            found = folder / f"{name}-finding-{hashlib.sha256(data).hexdigest()[:12]}"
            found.write_bytes(data)
            print(f"{name}, -seed={seed}: {found}", file=sys.stderr, flush=True)
            raise

    atheris.Setup([name, *flags, str(corpus), str(recorded)], kept, custom_mutator=custom)
    atheris.Fuzz()


def unguided(name: str, seed: int, *, seconds: float = 0, runs: int = 0) -> tuple[int, bytes, str]:
    """The recorded inputs and then their mutations, for so many seconds and at least so many,
    without libFuzzer and its guidance: how many, and the first finding, if any, with its
    traceback."""
    one, mutate = target(name)
    logging.disable(logging.CRITICAL)
    sys.addaudithook(no_unpickling)
    rng, inputs = random.Random(seed), recorded_for(name)
    recorded, count, end = len(inputs), 0, time.monotonic() + seconds
    while count < max(recorded, runs) or time.monotonic() < end:
        if count < recorded:
            data = inputs[count]
        else:
            data = rng.choice(inputs)
            for _ in range(rng.randrange(1, 4)):
                data = mutate(data, partial(any_bytes, rng), rng, MAX_LEN)
        count += 1
        try:
            one(data)
        except BaseException:
            return count, data, traceback.format_exc()
    return count, b"", ""


def any_bytes(rng: random.Random, frame: bytes, max_size: int) -> bytes:
    """In the place of libFuzzer's mutator: some bytes of it replaced, added or removed."""
    at = rng.randrange(len(frame) + 1)
    return (frame[:at] + rng.randbytes(rng.randrange(5)) + frame[at + rng.randrange(5) :])[
        :max_size
    ]


def report_unguided(name: str, seed: int, runs: int) -> int:
    """Print what `unguided` found; the exit status."""
    seed = seed or random.randrange(1 << 30)
    count, data, trace = unguided(name, seed, runs=runs)
    print(f"{name}: {count} inputs, seed {seed}: {trace or 'no finding'}")
    if trace:
        print(data)
    return bool(trace)


def replay(name: str, folder: Path) -> None:
    """Run a target's corpus and seeds once more."""
    one, _ = target(name)
    logging.disable(logging.CRITICAL)
    for place in (folder / name, HERE / "seeds" / ALL[name]):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            one(path.read_bytes())


def report(names: list[str], folder: Path) -> None:
    """Print which lines of the parsers the corpora reach. One process a target."""
    files = [*PARSERS, *(PARSERS_WITH_SGLANG if set(names) & set(WITH_SGLANG) else ())]
    measured = Coverage(
        data_file=str(folder / ".coverage"), include=[f"*/sglang_mixkv/{file}" for file in files]
    )
    for name in names:
        options = [f"--data-file={folder}/.coverage.{name}", "--include=*/sglang_mixkv/*"]
        call = [__file__, "replay", name, "--folder", str(folder)]
        subprocess.run([sys.executable, "-m", "coverage", "run", *options, *call], check=True)
    measured.combine([f"{folder}/.coverage.{name}" for name in names])
    measured.report(show_missing=True, precision=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("fuzz", "unguided", "replay", "shares", "coverage"))
    parser.add_argument("target", nargs="?", choices=ALL)
    parser.add_argument("--all", action="store_const", const=list(ALL), dest="names")
    parser.add_argument("--pure", action="store_const", const=list(PURE), dest="names")
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.what == "fuzz":
        fuzz(args.target, args.folder, args.runs, args.seed)
    elif args.what == "unguided":
        status = report_unguided(args.target, args.seed, args.runs)
        sys.stdout.flush()
        os._exit(status)  # a rank's threads would keep the process
    elif args.what == "replay":
        replay(args.target, args.folder)
    elif args.what == "coverage":
        report(args.names, args.folder)
    else:
        weights = [WEIGHT if name in PURE else 1 for name in args.names]
        for name, weight in zip(args.names, weights, strict=True):
            print(name, -(-args.runs * weight // sum(weights)))


if __name__ == "__main__":
    main()
