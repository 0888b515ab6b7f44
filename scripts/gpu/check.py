"""What an NVIDIA GPU shows of the plugin, part by part: see options.py, or --help.

machine    what is here, in a process of its own: PyTorch is not imported in this one
parts      one after the other, each in a process of its own, within its limit
results    one line each; JSON; tables
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
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
from wheels import Wheels  # noqa: E402

from sglang_mixkv.demo import leash  # noqa: E402

SAYS = "mixkv-gpu "
TAIL = 3  # lines of a process that ended without a word
OUTPUT = 60  # lines of a process whose part did not pass, in the JSON
MACHINE, MACHINE_S = "machine", 120.0
NVIDIA = Path("/dev/nvidiactl")


# ---------------------------------------------------------------- in a part's own process


def machine(options: argparse.Namespace) -> Record:
    """What a reader must know of this machine. `lacks`: why there is no GPU to use."""
    import common
    import kernels

    found = {**common.machine(), "lacks": kernels.lacking(), "gpus": 0}
    if not found["lacks"]:
        import torch

        count = torch.cuda.device_count()
        about = torch.cuda.get_device_properties(options.gpu if options.gpu < count else 0)
        found.update(
            gpu=about.name, gpus=count, cuda=torch.version.cuda,
            gpu_memory_gib=round(about.total_memory / 2**30, 1),
            capability=f"{about.major}.{about.minor}", driver=_driver(),
        )  # fmt: skip
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip().partition("\n")[0]


def run_here(part: Part, options: argparse.Namespace) -> Outcome:
    """The part in this process."""
    try:
        found = importlib.import_module(part.module).run(options, *part.args)
    except Unpassed as why:
        verdict = LACKS if isinstance(why, Lacks) else FAILED
        return Outcome.of(part.name, verdict, str(why), why.found)
    except ModuleNotFoundError as error:
        ours = (error.name or "").startswith("sglang_mixkv")
        if ours or not error.name:
            raise
        return Outcome(part.name, LACKS, f"the package {error.name}")
    except Exception as error:
        traceback.print_exc()
        if lacks := needs.uncompiled(error):
            return Outcome(part.name, LACKS, lacks)
        return Outcome(part.name, FAILED, f"{type(error).__name__}: {error}")
    return Outcome.of(part.name, PASSED, found.says, found)


def say(value: Any) -> None:
    print("\n" + SAYS + json.dumps(value, default=lambda other: other.item()), flush=True)


# ---------------------------------------------------------------- the parts' processes


class Ended(Exception):
    """A process that ended without its word. `output`: its last lines."""

    def __init__(self, how: str, lines: list[str]) -> None:
        last = " | ".join(line for line in lines[-TAIL:] if line)
        super().__init__(f"{how}: {last}" if last else how)
        self.output = lines[-OUTPUT:]


class Late(Ended):
    """One that did not end in its time."""


def in_a_process(argv: list[str], env: dict[str, str], folder: Path, limit_s: float) -> Any:
    """What a process of this script says with these arguments. All that it started ends too; where
    this process is killed, so does it, and the folder is removed."""
    tied = [sys.executable, leash.__file__, str(os.getpid()), str(folder)]
    with tempfile.TemporaryFile("w+", dir=folder) as out:
        child = subprocess.Popen(
            [*tied, sys.executable, sys.argv[0], *argv], env=env, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
        is_late = False
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            child.terminate()
            child.wait()
            out.seek(0)
            lines = out.read().splitlines()
    said = [line.removeprefix(SAYS) for line in lines if line.startswith(SAYS)]
    if said:
        result = json.loads(said[-1])
        if isinstance(result, dict) and result.get("verdict") == FAILED:
            shown = [line for line in lines if not line.startswith(SAYS)]
            print("\n".join(shown), file=sys.stderr)
            result["output"] = shown[-OUTPUT:]
        return result
    print("\n".join(lines), file=sys.stderr)
    if is_late:
        raise Late(f"did not end within {limit_s:.0f} s", lines)
    raise Ended(f"its process ended with status {child.returncode}", lines)


class Check:
    """The parts that were asked for, one after the other."""

    def __init__(self, argv: list[str], options: argparse.Namespace, folder: Path) -> None:
        """`folder`: for its temporary files."""
        self._argv, self._options, self._folder = argv, options, folder
        (site := folder / "site").mkdir()
        self._wheels = Wheels(options.wheels, site)
        self._deadline = time.monotonic() + options.limit_s
        self.machine: Record = {}
        self.outcomes: list[Outcome] = []

    def look(self) -> None:
        """See what the machine is, and choose the device."""
        asked = self._options.device
        try:
            self.machine = self._ask(MACHINE, MACHINE_S)
        except Ended as why:
            self.machine = {"lacks": f"a usable Python environment: {why}", "gpus": 0}
            if NVIDIA.exists() and asked == "auto":
                asked = "cuda"  # a check of the CPU alone would pass for one of the GPU
        lacks = self.machine["lacks"]
        if asked == "cuda" and lacks:
            command_line.parser().error(f"--device cuda: {lacks}")
        device = "cpu" if lacks or asked == "cpu" else "cuda"
        command_line.settle(self._options, device, self.machine["gpus"])
        most = max(self._options.gpu, self._options.peer_gpu)
        if device == "cuda" and most >= self.machine["gpus"]:
            count = self.machine["gpus"]
            command_line.parser().error(f"there is no GPU {most} here, but {count} from 0 on")

    def _ask(self, name: str, limit_s: float) -> Any:
        options = self._options
        chosen = ["--seed", str(options.seed), "--device", options.device, "--here", name]
        if options.peer_gpu is not None:
            chosen += ["--peer-gpu", str(options.peer_gpu)]
        return in_a_process([*self._argv, *chosen], self._environment(), self._folder, limit_s)

    def _environment(self) -> dict[str, str]:
        env = {"SGLANG_MIXKV_LEASH_GRACE_S": "5", **os.environ, "PYTHONUNBUFFERED": "1"}
        before = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *self._wheels.paths, *before])
        env.pop("TRITON_INTERPRET", None)
        if self._options.device == "cpu":
            env.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
        return env

    def run(self, part: Part) -> Outcome:
        left = self._deadline - time.monotonic()
        start = time.monotonic()
        if part.needs_gpu and self._options.device == "cpu":
            why = self.machine["lacks"] or "--device cpu"
            outcome = Outcome(part.name, LACKS, f"an NVIDIA GPU: {why}")
        elif left <= 0:
            outcome = Outcome(part.name, LACKS, f"time: {self._options.limit_s} s are over")
        else:
            outcome = self._run(part, left)
        outcome.seconds = round(time.monotonic() - start, 1)
        self.outcomes.append(outcome)
        return outcome

    def _run(self, part: Part, left: float) -> Outcome:
        """`left`: seconds of all parts. One that they cut may be right."""
        limit_s = left if part.is_long else self._options.part_limit_s
        try:
            return Outcome(**self._ask(part.name, min(left, limit_s)))
        except Ended as why:
            verdict, says = FAILED, str(why)
            if isinstance(why, Late) and left <= limit_s:
                all_s = self._options.limit_s
                verdict = LACKS
                says = f"time: the {all_s} s of all parts were over {left:.0f} s after its start"
            return Outcome(part.name, verdict, says, output=why.output)

    def result(self) -> Record:
        return {
            "check": "gpu", "device": self._options.device, "seed": self._options.seed,
            "machine": self.machine, "notes": self._wheels.notes,
            "parts": [asdict(outcome) for outcome in self.outcomes],
        }  # fmt: skip


# ---------------------------------------------------------------- what it writes


def heading(result: Record) -> str:
    """Where this ran."""
    machine, packages = result["machine"], result["machine"].get("packages", {})
    found = [machine.get("gpu") or f"{machine.get('processor', 'unknown processor')}, no GPU"]
    found += [f"driver {machine['driver']}"] if machine.get("driver") else []
    found += [f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages]
    text = ", ".join([*found, f"seed {result['seed']}"]) + "."
    cpu = " On the CPU, with small sizes: this says nothing of a GPU."
    return text + (cpu if result["device"] == "cpu" else "")


def markdown(result: Record) -> str:
    """A table of the parts, then one of the figures of each."""
    from render import table

    rows = [{"part": p["name"], "verdict": p["verdict"], "what it says": p["says"],
             "seconds": p["seconds"]} for p in result["parts"]]  # fmt: skip
    texts = [heading(result) + "\n", table(rows)]
    for part in result["parts"]:
        if part["short"]:
            texts += [f"**{part['name']}**\n", table(part["short"])]
    return "\n".join(texts)


def line(outcome: Outcome) -> str:
    name = outcome.name.ljust(max(len(part.name) for part in PARTS))
    return f"{name}  {outcome.verdict:<6}  {outcome.seconds:6.1f} s  {outcome.says}"


def write(options: argparse.Namespace, result: Record) -> None:
    """The files that were asked for."""
    for path in filter(None, (options.json, options.table)):
        path.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.table:
        options.table.write_text(markdown(result))


def check(argv: list[str], options: argparse.Namespace, folder: Path) -> int:
    """All parts: the exit status. The files are written after each, for a run that is cut short."""
    made = Check(argv, options, folder)
    made.look()
    result = made.result()
    print(heading(result), *result["notes"], sep="\n", flush=True)
    write(options, result)
    for part in PARTS:
        if options.only is None or part.name in options.only:
            print(line(made.run(part)), flush=True)
            write(options, made.result())
    bad = {FAILED, LACKS} if options.strict else {FAILED}
    return int(any(outcome.verdict in bad for outcome in made.outcomes))


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = command_line.parse(argv)
    if options.here == MACHINE:
        say(machine(options))
        return 0
    if options.here:
        command_line.settle(options, options.device, (options.peer_gpu or 0) + 1)
        (part,) = (part for part in PARTS if part.name == options.here)
        say(asdict(run_here(part, options)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mixkv-gpu-") as folder:
        return check(argv, options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
