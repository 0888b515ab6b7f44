"""Where the seconds of a server's start go, and how many of them are the plugin's.

    python scripts/bench/startup.py [--side decode] [--flags="--tp 2"]

Starts one server of the small pair on CPU under py-spy, which looks 100 times a second at what each
thread of its processes does, until the server answers. A look belongs to whoever called last:
SGLang, the plugin, or the plugin's CPU engine, which a GPU server does without. An import belongs
to the module that asks for it, and SGLang's imports are a column of their own. The plugin's check
imports SGLang's modules earlier than SGLang would: they count as SGLang's, since the server imports
them in any case. Threads that wait are not counted.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import psutil

import mixkv_cpu
import sglang_mixkv
from mixkv_demo import launch
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import start

RATE = 100  # looks in a second
WRITES_S = 60
OWNERS = {  # folder -> whose, the first that fits
    Path(mixkv_cpu.__file__).parent: "CPU engine",
    Path(sglang_mixkv.__file__).parent: "plugin",
    Path(str(find_spec("sglang").origin)).parent: "SGLang",
}
COLUMNS = ("imports", "SGLang", "CPU engine", "plugin", "Python")
PROCESS = re.compile(r'process (\d+):"[^"]*"(?:;|$)')
IMPORT = "<frozen importlib"

Shares = dict[int, Counter[str]]  # process -> column -> looks


def owner(frames: list[str]) -> str:
    """Of the innermost frame whose owner is known."""
    owners = (who for frame in reversed(frames) for at, who in OWNERS.items() if f"{at}/" in frame)
    return next(owners, "Python")


def column(frames: list[str]) -> str:
    """SGLang's modules and what they import are its imports, whoever asked for them first."""
    first_import = next((n for n, frame in enumerate(frames) if IMPORT in frame), None)
    if first_import is None:
        return owner(frames)
    importer = owner(frames[first_import:])
    if importer == "Python":
        importer = owner(frames[:first_import])
    return importer if importer in ("plugin", "CPU engine") else "imports"


def read(lines: Iterable[str]) -> Shares:
    """Of py-spy's raw format: `process N:"command";frame;frame looks`, a child after its parent."""
    found: Shares = {}
    for line in lines:
        stack, _, looks = line.rpartition(" ")
        process = int(PROCESS.findall(f"{stack};")[-1])
        frames = PROCESS.sub("", f"{stack};").split(";")[:-1]
        found.setdefault(process, Counter())[column(frames)] += int(looks)
    return found


def watched(server: launch.Launch, out: Path) -> launch.Launch:
    spy = shutil.which("py-spy")
    if spy is None:
        sys.exit("py-spy is not installed; SGLang's wheel brings it")
    command = [
        *(spy, "record", "--subprocesses", "--full-filenames", "--format", "raw"),
        *("--rate", str(RATE), "--duration", "600", "--output", str(out), "--"),
    ]
    return replace(server, argv=(*command, *server.argv))


@dataclass
class Start:
    """`seconds` until it answers; `names`: of its processes, then; `errors`: what py-spy missed."""

    seconds: float
    names: dict[int, str]
    shares: Shares
    errors: str

    def table(self) -> str:
        lines = ["| process | " + " | ".join(f"{name}, s" for name in COLUMNS) + " |"]
        lines.append("|---" * (len(COLUMNS) + 1) + "|")
        for process, looks in self.shares.items():
            cells = " | ".join(f"{looks[name] / RATE:.2f}" for name in COLUMNS)
            lines.append(f"| {self.names.get(process, 'ended before')} | {cells} |")
        return "\n".join(lines)


def names_of(spy: psutil.Process) -> dict[int, str]:
    """SGLang's children set theirs; the first is what py-spy started."""
    first, *others = spy.children(recursive=True)
    return {first.pid: "launcher"} | {one.pid: one.cmdline()[0] for one in others}


def measure(server: launch.Launch) -> Start:
    with Fleet() as fleet:
        out, begin = fleet.folder("spy") / "looks", time.monotonic()
        (running,) = start(fleet, [watched(server, out)])
        seconds = time.monotonic() - begin
        spy = psutil.Process(fleet.pids()[server.name])
        names = names_of(spy)
        spy.send_signal(signal.SIGINT)  # it writes, and ends
        spy.wait(WRITES_S)
        errors = re.findall(r"Errors: \d+", running.tail())
        return Start(
            seconds, names, read(out.read_text().splitlines()), " ".join(errors) or "Errors: 0"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--side", choices=("prefill", "decode"), default="prefill")
    parser.add_argument("--flags", default="--tp 1", help="of that server")
    parser.add_argument("--spawn", action="store_true", help="processes start as on GPUs")
    parser.add_argument("--stock", action="store_true", help="without the plugin's flag")
    options = parser.parse_args()
    flags, enable = tuple(shlex.split(options.flags)), () if options.stock else ("--enable-mixkv",)
    topology = launch.Topology(flags, flags, enable, enable, spawn=options.spawn)
    prefill, decode, _ = launch.prefill_and_decode("mla", topology, "")
    found = measure(prefill if options.side == "prefill" else decode)
    print(f"answers after {found.seconds:.1f} s; py-spy: {found.errors}\n")
    print(found.table())


if __name__ == "__main__":
    main()
