"""Where the seconds of a server's start go, and how many of them are the plugin's.

    python scripts/bench/startup.py [--side decode] [--flags="--tp 2"]

Starts one server of the small pair on CPU under py-spy, which looks 100 times a second at what each
of its processes does, until the server answers. A look belongs to whoever called last: SGLang, the
plugin (what it imports included), or the plugin's CPU engine, which a GPU server does without.
SGLang's imports are a column of their own. Time in which a process waits is not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import sglang_mixkv
from sglang_mixkv.demo import launch
from sglang_mixkv.demo.processes import Fleet, ServerDied
from sglang_mixkv.demo.servers import start

RATE = 100  # looks in a second
PLUGIN = Path(sglang_mixkv.__file__).parent
OWNERS = {  # folder -> whose, the first that fits
    PLUGIN / "cpu": "CPU engine",
    PLUGIN: "plugin",
    Path(str(find_spec("sglang").origin)).parent: "SGLang",
}
COLUMNS = ("imports", "SGLang", "CPU engine", "plugin", "Python")
PROCESS = re.compile(r'process \d+:"(.*)"')

Shares = dict[str, Counter[str]]  # process -> column -> looks


def column(frames: list[str]) -> str:
    """Whose frame is the last one that is anybody's."""
    owners = (who for frame in reversed(frames) for at, who in OWNERS.items() if f"{at}/" in frame)
    found = next(owners, "Python")
    if found in ("SGLang", "Python") and any("<frozen importlib" in frame for frame in frames):
        return "imports"
    return found


def read(lines: Iterable[str]) -> Shares:
    """Of py-spy's raw format: `process N:"name";frame;frame looks`; a child follows its parent."""
    found: Shares = {}
    for line in lines:
        stack, _, looks = line.rpartition(" ")
        frames = stack.split(";")
        names = [name[1] for frame in frames if (name := PROCESS.fullmatch(frame))]
        process = names[-1] if len(names) > 1 else "launcher"
        own = [frame for frame in frames if not PROCESS.fullmatch(frame)]
        found.setdefault(process, Counter())[column(own)] += int(looks)
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


def measure(server: launch.Launch) -> tuple[float, Shares]:
    """Seconds until it answers, and the looks."""
    with Fleet() as fleet:
        out, begin = fleet.folder("spy") / "looks", time.monotonic()
        start(fleet, [watched(server, out)])
        seconds = time.monotonic() - begin
        os.kill(fleet.pids()[server.name], signal.SIGINT)  # py-spy writes, and ends
        with suppress(ServerDied):
            while True:
                fleet.check()
                time.sleep(0.2)
        return seconds, read(out.read_text().splitlines())


def table(shares: Shares) -> str:
    lines = ["| process | " + " | ".join(f"{name}, s" for name in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for process, looks in shares.items():
        cells = " | ".join(f"{looks[name] / RATE:.2f}" for name in COLUMNS)
        lines.append(f"| {process[:40]} | {cells} |")
    return "\n".join(lines)


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
    seconds, shares = measure(prefill if options.side == "prefill" else decode)
    print(f"answers after {seconds:.1f} s\n")
    print(table(shares))


if __name__ == "__main__":
    main()
