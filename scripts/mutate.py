"""Test mutants of the package, each in a process that is forked with the libraries loaded.

Mutants are written to copies of the checkout. Results stay in ~/.cache/sglang-mixkv until a Python
or TOML file changes, so that a run resumes where the last one stopped. A mutant is late if its
tests take too long. Its result is not stored, since the machine may be slow. Exit status: 1 if any
mutant survives; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "sglang_mixkv/*.py"  # also in subfolders
ENDS = (signal.SIGINT, signal.SIGTERM)
FORK = multiprocessing.get_context("fork")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sglang-mixkv")

sys.path.insert(0, str(ROOT / "tests"))
from mutants import OUTPUT, Mutant, mutants, run_tests  # noqa: E402

CONFIG: dict[str, Any] = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutate.sh", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders (default: all)")
    parser.add_argument("--without", action="append", default=[], metavar="PATH", help="exclude")
    parser.add_argument("--since", metavar="COMMIT", help="mutants on lines changed since COMMIT")
    parser.add_argument("--draw", type=int, metavar="N", help="a sample of N, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="limit; the next run resumes")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time")
    return parser.parse_args()


def git(*command: str) -> list[str]:
    return subprocess.check_output(["git", *command], cwd=ROOT, text=True).splitlines()


def part_of(file: str) -> dict[str, Any]:
    fits = (part for part in CONFIG["part"] if any(fnmatch(file, one) for one in part["files"]))
    return next(fits, {})


class Known:
    """Results on these files: whether a mutant was killed, or the seconds that tests take without
    one."""

    def __init__(self, files: list[str]) -> None:
        self._kept = CACHE / f"mutants-{hashlib.sha256(bytes(ROOT)).hexdigest()[:8]}.jsonl"
        code = [(ROOT / file).read_bytes() for file in files if file.endswith((".py", ".toml"))]
        tree = hashlib.sha256(b"".join(code)).hexdigest()
        self.found: dict[Mutant | str, float] = {}
        lines = self._kept.read_text().splitlines() if self._kept.exists() else []
        if lines[:1] == [tree]:
            for one, found in map(json.loads, lines[1:]):
                self.found[one if isinstance(one, str) else Mutant(*one)] = found
        else:
            CACHE.mkdir(parents=True, exist_ok=True)
            self._kept.write_text(tree + "\n")

    def add(self, one: Mutant | str, found: float) -> None:
        self.found[one] = found
        with self._kept.open("a") as file:
            file.write(json.dumps([one, found]) + "\n")


def choose(files: list[str], args: argparse.Namespace) -> list[Mutant]:
    files = [f for f in sorted(files) if fnmatch(f, PACKAGE) and is_in(f, args.paths or [ROOT])]
    files = [file for file in files if not is_in(file, args.without)]
    if not files:
        sys.exit(f"no file of the package is in {' '.join(args.paths)}")
    changed = changed_since(args.since) if args.since else dict.fromkeys(files, range(10**6))
    bare = [f for f in files if f in changed and not part_of(f) and mutants(ROOT, f, CONFIG)]
    if bare:
        print(f"not covered, no part of tests/mutants.toml has tests: {', '.join(bare)}")
    files = [file for file in files if part_of(file)]
    found = [one for file in files if file in changed for one in mutants(ROOT, file, CONFIG)]
    equivalent = claimed(found, set(files))
    found = [one for one in found if one not in equivalent and one.line in changed[one.file]]
    if args.draw or args.since:
        found = random.Random(args.seed).sample(found, min(args.draw or len(found), len(found)))
    if args.since:  # mutants with tests that take long to load go last
        found.sort(key=lambda one: len(part_of(one.file).get("preload", ())))
    return found


def is_in(file: str, paths: list[str]) -> bool:
    return any((ROOT / file).is_relative_to(os.path.abspath(path)) for path in paths)


def changed_since(commit: str) -> dict[str, Any]:
    new = git("ls-files", "-o", "--exclude-standard")
    lines: dict[str, Any] = dict.fromkeys(new, range(10**6))
    for line in git("diff", "-U0", "--no-ext-diff", commit):
        if line.startswith("+++ "):
            file = lines.setdefault(line[6:], set())
        elif at := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            file.update(range(int(at[1]), int(at[1]) + int(at[2] or 1)))
    return lines


def claimed(found: list[Mutant], files: set[str]) -> set[Mutant]:
    """Return the equivalent mutants of tests/mutants.toml. Exit if an entry matches no mutant."""
    claims = {
        (one["file"], one["function"], one["line"], one["mutant"]): set[Mutant]()
        for one in CONFIG.get("equivalent", ())
        if one["file"] in files or not (ROOT / one["file"]).exists()
    }
    places = {claim[:2] for claim in claims}
    for one in found:
        if (one.file, one.function) in places:
            claims.get((one.file, one.function, *one.change(ROOT)), set()).add(one)
    mutated = {one.file for one in found} | {f for f, *_ in claims if not (ROOT / f).exists()}
    if stale := [claim for claim, those in claims.items() if not those and claim[0] in mutated]:
        sys.exit(f"tests/mutants.toml has entries without a mutant: {stale}")
    return set[Mutant]().union(*claims.values())


class Runner:
    """Runs tests on copies of these files, until `end` or a signal. No signal handler raises, since
    Python drops an exception in a callback of an import or a fork."""

    def __init__(self, files: list[str], folder: Path, jobs: int, end: float, known: Known) -> None:
        self._known, self._end, (self._signals, writes) = known, end, os.pipe()
        os.set_blocking(writes, False)
        signal.set_wakeup_fd(writes)
        for number in ENDS:
            signal.signal(number, lambda *_: None)
        self._copies = [folder / str(number) for number in range(jobs)]
        for copy in self._copies:
            for file in files:
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, copy / file, follow_symlinks=False)
        self._written = 10**9
        self.children: set[Any] = set()

    def run(self, todo: Iterable[Mutant]) -> Iterator[tuple[Mutant, bool | None]]:
        """Yield each mutant when its tests have ended, with True if they killed it, False if it
        survived, and None if it is late."""
        rest, free = iter(todo), list(self._copies)
        running: dict[int, tuple[Any, Mutant, Path, float]] = {}
        while True:
            while free and (one := next(rest, None)):
                limit = 5 + 4 * self._seconds(part_of(one.file), free[-1])
                process = self._start(part_of(one.file), copy := free.pop(), one)
                running[os.pidfd_open(process.pid)] = process, one, copy, time.monotonic() + limit
            if not running:
                return
            ready = self._wait(running, min(entry[3] for entry in running.values()))
            late = {fd for fd, entry in running.items() if time.monotonic() >= entry[3]}
            for fd in late.union(ready):
                process, one, copy, _ = running.pop(fd)
                os.close(fd)
                failed = self.stop(process) != 0
                shutil.copy2(ROOT / one.file, copy / one.file)
                free.append(copy)
                yield one, failed if fd in ready else None

    def _wait(self, fds: Iterable[int], until: float) -> set[int]:
        """Return the fds that can be read by `until`. Raises SystemExit when the run ends."""
        wait = max(0.0, min(until, self._end) - time.monotonic())
        ready = set(select.select([self._signals, *fds], [], [], wait)[0])
        if self._signals in ready or time.monotonic() >= self._end:
            sys.exit(130 if self._signals in ready else 0)
        return ready

    def _seconds(self, part: dict[str, Any], copy: Path) -> float:
        """Return the seconds that the tests take without a mutant."""
        tests, known = json.dumps(part["tests"]), self._known
        for module in ("numpy", "msgspec", "zmq", *part.get("preload", ())):
            importlib.import_module(module)
        self._wait((), 0)
        if tests not in known.found:
            begun, process = time.monotonic(), self._start(part, copy, None)
            ended = os.pidfd_open(process.pid)  # its sentinel also waits for what it started
            self._wait([ended], float("inf"))
            os.close(ended)
            if self.stop(process):
                output = (copy / OUTPUT).read_text(errors="replace")[-3000:]
                sys.exit(f"these tests fail without a mutant: {tests}\n{output}")
            known.add(tests, time.monotonic() - begun)
        return known.found[tests]

    def _start(self, part: dict[str, Any], copy: Path, one: Mutant | None) -> Any:
        if one:
            (copy / one.file).write_text(one.code(ROOT))
            self._written += 1  # bytecode is matched by its source's size and time in seconds
            os.utime(copy / one.file, (self._written, self._written))
        process = FORK.Process(target=_child, args=(part["tests"], copy))
        process.start()
        self.children.add(process)
        return process

    def stop(self, process: Any) -> int:
        for kill in (os.killpg, os.kill):  # the child may not have made its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
        self.children.discard(process)
        process.join()
        return process.exitcode


def _child(tests: list[str], copy: Path) -> None:
    signal.set_wakeup_fd(-1)
    code = 1
    try:
        code = run_tests(tests, ROOT, copy)
    finally:
        os._exit(code)  # without waiting for threads of the tests


def report(chosen: list[Mutant], known: Known, late: int) -> int:
    """Print a line for each survivor, and one with the scores. Return the number of survivors."""
    scores: dict[str, Counter[bool]] = defaultdict(Counter)
    for one in sorted(one for one in chosen if one in known.found):
        scores[os.path.dirname(one.file)][bool(known.found[one])] += 1
        if not known.found[one]:
            print(f"{one.file}:{one.line} {one.function}: {'  ->  '.join(one.change(ROOT))}")
    shares = [f"{f} {100 * s[True] // s.total()} % of {s.total()}" for f, s in scores.items()]
    rest = len(chosen) - sum(s.total() for s in scores.values()) - late
    print(f"killed: {', '.join(shares) or 'none'}; {late} late, {rest} not run", flush=True)
    return sum(s[False] for s in scores.values())


def main() -> None:
    args = arguments()
    end, status, late, survivors = time.monotonic() + args.seconds, None, 0, 0
    files = [f for f in git("ls-files", "-co", "--exclude-standard") if (ROOT / f).is_file()]
    chosen, known = choose(files, args), Known(files)
    with tempfile.TemporaryDirectory(prefix="mixkv-mutants-", ignore_cleanup_errors=True) as folder:
        runner = Runner(files, Path(folder), args.jobs, end, known)
        try:
            for one, killed in runner.run([m for m in chosen if m not in known.found]):
                if killed is None:
                    late += 1
                else:
                    known.add(one, killed)
        except SystemExit as ended:
            status = ended.code
        finally:
            for process in list(runner.children):
                runner.stop(process)
            survivors = report(chosen, known, late)
    sys.exit(status or min(survivors, 1))


if __name__ == "__main__":
    main()
