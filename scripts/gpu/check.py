"""What an NVIDIA GPU shows of the plugin, part by part: see options.py, or --help.

machine    what is here, in a process of its own: PyTorch is not imported in this one
parts      one after the other, each in a process of its own, within its limit
results    one line and a table each; JSON
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACES = [str(HERE), str(ROOT / "scripts" / "bench"), str(ROOT)]
sys.path[:0] = [place for place in PLACES if place not in sys.path]

import needs  # noqa: E402
import options as command_line  # noqa: E402
from parts import FAILED, LACKS, PARTS, PASSED, Lacks, Outcome, Part, Record, Unpassed  # noqa: E402

from mixkv_demo import leash  # noqa: E402

TAIL = 3  # lines of a process that ended without a result
OUTPUT = 60  # lines of a process whose part did not pass, in the JSON
ROWS = 48  # of a table: the last figures
MACHINE, MACHINE_S = "machine", 120.0


# ---------------------------------------------------------------- in a part's own process


def run_here(part: Part, options: argparse.Namespace) -> Outcome:
    """The part in this process."""
    try:
        found = importlib.import_module(part.module).run(options, *part.args)
    except Unpassed as why:
        verdict = LACKS if isinstance(why, Lacks) else FAILED
        return Outcome(part.name, verdict, str(why), figures=why.found.figures)
    except Exception as error:
        traceback.print_exc()
        return Outcome(part.name, FAILED, f"{type(error).__name__}: {error}")
    return Outcome(part.name, PASSED, found.message, figures=found.figures)


# ---------------------------------------------------------------- the parts' processes


def in_a_process(
    argv: list[str], env: dict[str, str], folder: Path, limit_s: float
) -> tuple[Any, str, list[str]]:
    """What a process of this script with these arguments writes to its file, or None; how it ended;
    its last lines. All that it started ends too, and it where this process is killed."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    tied = [sys.executable, leash.__file__, str(os.getpid()), str(folder)]
    how = f"did not end within {limit_s:.0f} s"
    with tempfile.TemporaryFile("w+", dir=folder) as out:
        child = subprocess.Popen(
            [*tied, sys.executable, sys.argv[0], *argv, "--json", str(result)], env=env,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = f"its process ended with status {child.wait(limit_s)}"
        child.terminate()
        child.wait()
        out.seek(0)
        lines = out.read().splitlines()[-OUTPUT:]
    found = json.loads(result.read_text()) if result.exists() else None
    if found is None or found.get("verdict") == FAILED:
        print("\n".join(lines), file=sys.stderr)
    last = " | ".join(filter(None, lines[-TAIL:]))
    return found, f"{how}: {last}" if last else how, lines


def unpacked(folders: list[Path], into: Path) -> tuple[list[str], list[str]]:
    """What --wheels puts on the path, and what did not work. A folder without wheels has packages
    that lie unpacked."""
    paths, notes = [str(into)], list[str]()
    for folder in folders:
        wheels = sorted(folder.glob("*.whl"))
        paths += [] if wheels else [str(folder.resolve())]
        for wheel in wheels:
            try:
                zipfile.ZipFile(wheel).extractall(into)
            except (OSError, zipfile.BadZipFile) as error:
                notes.append(f"{wheel.name}: {error}")
    return paths, notes


class Check:
    """The parts that were asked for, one after the other."""

    def __init__(self, argv: list[str], options: argparse.Namespace, folder: Path) -> None:
        """`folder`: for its temporary files."""
        self._argv, self._options, self._folder = argv, options, folder
        self._paths, self.notes = unpacked(options.wheels, folder / "site")
        self._deadline = time.monotonic() + options.limit_s
        self.machine: Any = {}
        self.outcomes: list[Outcome] = []

    def look(self) -> None:
        """See what the machine is, and choose the device."""
        asked, options = self._options.device, self._options
        self.machine, how, _ = self._ask(MACHINE, MACHINE_S)
        if self.machine is None:
            lacks = dict.fromkeys(needs.LOOKS, f"a usable Python environment: {how}")
            self.machine = {"lacks": lacks, "gpus": 0}
        lacks_gpu = self.machine["lacks"]["gpu"]
        if asked == "cuda" and lacks_gpu:
            command_line.parser().error(f"--device cuda: {lacks_gpu}")
        device = "cpu" if lacks_gpu or asked == "cpu" else "cuda"
        command_line.settle(options, device)
        most = max(options.gpu, options.peer_gpu)
        if device == "cuda" and most >= self.machine["gpus"]:
            count = self.machine["gpus"]
            command_line.parser().error(f"there is no GPU {most} here, but {count} from 0 on")

    def _ask(self, name: str, limit_s: float) -> Any:
        options = self._options
        chosen = ["--seed", str(options.seed), "--device", options.device, "--here", name]
        env = self.environment()
        return in_a_process([*self._argv, *chosen], env, self._folder, limit_s)

    def environment(self) -> dict[str, str]:
        env = {"MIXKV_LEASH_GRACE_S": "5", **os.environ, "PYTHONUNBUFFERED": "1"}
        before = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *self._paths, *before])
        env.pop("TRITON_INTERPRET", None)
        if self._options.device == "cpu":
            env.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
        return env

    def lacking(self, part: Part) -> list[str]:
        """What the part needs on a GPU, and this machine has not."""
        lacks = self.machine["lacks"]
        found = [lacks[name] for name in ("gpu", *part.needs) if lacks[name]]
        if self._options.device == "cpu" and not lacks["gpu"]:
            found.insert(0, "a GPU, with --device cpu")
        return list(dict.fromkeys(found))

    def run(self, part: Part) -> Outcome:
        left, start = self._deadline - time.monotonic(), time.monotonic()
        lacks = self.lacking(part)
        if left <= 0:
            outcome = Outcome(part.name, LACKS, f"time: {self._options.limit_s} s are over")
        elif self._options.device == "cpu":
            outcome = self._run_dry(part, left, "; ".join(lacks))
        elif lacks:
            outcome = Outcome(part.name, LACKS, "; ".join(lacks))
        else:
            outcome = self._run(part, left)
        outcome.seconds = round(time.monotonic() - start, 1)
        self.outcomes.append(outcome)
        return outcome

    def _run(self, part: Part, left: float) -> Outcome:
        limit_s = left if part.is_long else min(left, self._options.part_limit_s)
        found, how, lines = self._ask(part.name, limit_s)
        outcome = Outcome(**found) if found else Outcome(part.name, FAILED, how)
        outcome.output = lines if outcome.verdict == FAILED else []
        return outcome

    def _run_dry(self, part: Part, left: float, lacks: str) -> Outcome:
        """On the CPU. Only its failure is a verdict of its own."""
        dry = None if part.dry is None else [self.machine["lacks"][name] for name in part.dry]
        if dry is None or any(dry):
            return Outcome(part.name, LACKS, lacks)
        outcome = self._run(part, left)
        if outcome.verdict != FAILED:
            outcome.verdict, outcome.message = LACKS, f"{lacks}. Dry run: {outcome.message}"
        return outcome

    def result(self) -> Record:
        return {
            "check": "gpu", "device": self._options.device, "seed": self._options.seed,
            "machine": self.machine, "notes": self.notes,
            "parts": [asdict(outcome) for outcome in self.outcomes],
        }  # fmt: skip


# ---------------------------------------------------------------- what it writes


def heading(result: Record) -> str:
    """Where this ran."""
    machine, packages = result["machine"], result["machine"].get("packages", {})
    found = [machine.get("gpu") or "no GPU", f"seed {result['seed']}"]
    found += [f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages]
    cpu = " On the CPU, with small sizes: this shows nothing of a GPU."
    return ", ".join(found) + "." + (cpu if result["device"] == "cpu" else "")


def what_is_there(made: Check, options: argparse.Namespace) -> None:
    machine, size = made.machine, needs.carried(ROOT, options.wheels) / 2**20
    most = needs.MOST / 2**20
    lines = [
        ("GPUs", f"{machine['gpus']}"),
        ("RDMA", machine.get("rdma") or "none"),
        ("packages", ", ".join(" ".join(one) for one in machine.get("packages", {}).items())),
        ("Triton", f"lacks {lacks}" if (lacks := machine["lacks"]["compiler"]) else "compiles"),
        ("to carry", f"{size:.1f} MiB of checkout and wheels, {most:.0f} at most"
         + (" (TOO MUCH)" if size > most else "")),
    ]  # fmt: skip
    for part in PARTS:
        lacks = made.lacking(part)
        lines.append((part.name, f"lacks {'; '.join(lacks)}" if lacks else "can run"))
    print("\n".join(f"{name:<12}{text}" for name, text in lines))


def line(outcome: Outcome) -> str:
    name = outcome.name.ljust(max(len(part.name) for part in PARTS))
    return f"{name}  {outcome.verdict:<6}  {outcome.seconds:6.1f} s  {outcome.message}"


def write(file: Path, result: Any) -> None:
    """At once, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps(result, indent=1, default=lambda other: other.item()) + "\n")
    whole.replace(file)


def check(argv: list[str], options: argparse.Namespace, folder: Path) -> int:
    """All parts: the exit status. The file is written after each, for a run that is cut short."""
    from render import table

    made = Check(argv, options, folder)
    made.look()
    result = made.result()
    print(heading(result), *result["notes"], sep="\n", flush=True)
    if options.what_is_there:
        what_is_there(made, options)
        return 0
    if options.listen:
        import packer

        os.environ.update(made.environment())
        with contextlib.suppress(KeyboardInterrupt):
            packer.listen(options)
        return 0
    write(options.json, result)
    for part in PARTS:
        if options.only is None or part.name in options.only:
            outcome = made.run(part)
            print(line(outcome), flush=True)
            if outcome.figures and options.device == "cuda":
                print(table(outcome.figures[-ROWS:]), flush=True)
            write(options.json, made.result())
    return int(any(outcome.verdict == FAILED for outcome in made.outcomes))


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = command_line.parse(argv)
    if options.here == MACHINE:
        write(options.json, needs.machine(options.gpu))
        return 0
    if options.here:
        command_line.settle(options, options.device)
        (part,) = (part for part in PARTS if part.name == options.here)
        write(options.json, asdict(run_here(part, options)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mixkv-gpu-") as folder:
        return check(argv, options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
