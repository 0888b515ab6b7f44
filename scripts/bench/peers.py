"""What peers cost the channel thread of one rank, and what their trouble costs the others.

A decode rank with so many prefill ranks, and a prefill rank with so many readers: its threads and
sockets are real, its peers are stood in for by processes of EACH. Rooms are of random peers and
have one segment of a few tokens, so that no time is spent in copies. A room of one segment is three
messages: OPEN, READY, ACK. Times of the channel thread are its CPU time.

    figures   memory and descriptors of a peer, by counts of peers taken in turns; seconds to the
              first READY of one room at a time; rooms per second with WINDOW at a time
    faults    rooms of healthy peers while others are stopped, gone on, or restarted
    profile   where the channel thread is while it is busy, if py-spy may look
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from common import Record, Result, alone, options

from sglang_mixkv.channel.times import Times

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
threads = importlib.import_module("rig.threads")
threads.SLOTS = 64  # as many as a rank has
peers = importlib.import_module("rig.peers")

KINDS = {"decode": peers.DecodeRank, "prefill": peers.PrefillRank}
COUNTS, EACH, WINDOW = (1, 10, 100, 1000), 100, 64
PAGE_KIB = os.sysconf("SC_PAGESIZE") / 1024
LONG, MESSAGES, IDLE_S, AGAIN_S, LOOKS = 8, 3, 1.0, 0.1, 500
PATIENT = Times(10)  # a cold room is no figure


class Rank:
    """One rank with its peers. `usage`: KiB and descriptors of this process."""

    def __init__(self, side: str, count: int, times: Times, each: int = EACH) -> None:
        self.rank: Any = KINDS[side](count, each, times)
        self.count, self.random = count, random.Random(count)
        (thread,) = (t for t in threading.enumerate() if t.name == self.rank.thread)
        self._clock = time.pthread_getcpuclockid(int(thread.ident or 0))

    def cpu(self) -> float:
        return time.clock_gettime(self._clock)

    def usage(self) -> Any:
        gc.collect()
        kib = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB
        return np.array([kib, len(os.listdir("/proc/self/fd"))])

    def draw(self, rooms: int, first: int = 0) -> list[int]:
        """Peers, none before `first`."""
        return [self.random.randrange(first, self.count) for _ in range(rooms)]

    def seconds(self, rooms: int, window: int, segments: int = 1) -> tuple[float, float]:
        """Of the channel thread, and of the clock, for one room."""
        cpu, clock = self.cpu(), time.perf_counter()
        self.rank.run(self.draw(rooms), window, segments)
        return (self.cpu() - cpu) / rooms, (time.perf_counter() - clock) / rooms


def quantiles(seconds: list[float | None], prefix: str = "") -> Record:
    warm = [one * 1e3 for one in seconds if one is not None] or [float("nan")]
    middle, most = np.percentile(warm, [50, 99]).tolist()
    return {f"{prefix}p50 ms": middle, f"{prefix}p99 ms": most, f"{prefix}max ms": max(warm)}


# ---------------------------------------------------------------- figures


def figures(side: str, count: int, rooms: int) -> Record:
    one = Rank(side, count, PATIENT)
    one.rank.connect(1)
    one.rank.run([0] * 20, 1)
    usage, begin = one.usage(), time.perf_counter()
    one.rank.connect(count - 1)
    seconds = time.perf_counter() - begin
    of_all = [*(one.usage() - usage), seconds * 1e3]
    cpu = one.cpu()
    time.sleep(IDLE_S)
    idle = (one.cpu() - cpu) / IDLE_S
    first = one.rank.run(one.draw(rooms // 4), 1)
    short, clock = one.seconds(rooms, WINDOW)
    many, _ = one.seconds(rooms, max(WINDOW, count))
    long, _ = one.seconds(rooms // LONG, WINDOW // LONG, LONG)
    names = ("KiB a peer", "descriptors a peer", "connect ms")
    each = {name: of / (count - 1) for name, of in zip(names, of_all, strict=True) if count > 1}
    return {
        "idle us/s": idle * 1e6, **quantiles(first, "first READY "),
        "us a message": short / MESSAGES * 1e6,
        "us a message, all ask at once": many / MESSAGES * 1e6,
        "us a further segment": (long - short) / (LONG - 1) * 1e6,
        "rooms/s of a full thread": 1 / short, "rooms/s here": 1 / clock, "busy": short / clock,
        **each,
    }  # fmt: skip


def by_count(counts: list[int], rooms: int, turns: int) -> list[Record]:
    """Medians over the turns; the order is drawn anew in each."""
    cells = [(side, count) for side in KINDS for count in counts]
    taken: dict[tuple[str, int], list[Record]] = {cell: [] for cell in cells}
    for turn in range(turns):
        for cell in random.Random(turn).sample(cells, len(cells)):
            print(turn, *cell, file=sys.stderr)
            taken[cell].append(alone(figures, *cell, rooms))
    return [
        {"side": side, "peers": count}
        | {name: float(np.median([one[name] for one in found])) for name in found[0]}
        for (side, count), found in taken.items()
    ]


# ---------------------------------------------------------------- faults


class Faults:
    """`each`: as many peers as meet a fault at once."""

    def __init__(self, side: str, count: int, each: int, rooms: int) -> None:
        self.side, self.each, self.rooms = side, each, rooms
        self.one = Rank(side, count, Times(), each)
        self.rank, self.records = self.one.rank, list[Record]()
        self.rank.connect(count)
        self.rank.run(list(range(count)), WINDOW)
        self.victims = list(range(each))

    def note(self, what: str, healthy: list[float | None], others: str = "") -> None:
        self.records.append(
            {"side": self.side, "peers": self.one.count, "while": what, "rooms": len(healthy),
             "cold": healthy.count(None), **quantiles(healthy, "first READY "), "others": others}
        )  # fmt: skip

    def healthy(self) -> list[float | None]:
        found: list[float | None] = self.rank.run(self.one.draw(self.rooms, self.each), 16)
        return found

    def all(self) -> list[Record]:
        self.note("all are healthy", self.healthy())
        self.stopped()
        before = self.one.usage()
        self.restarted()
        kib, descriptors = self.one.usage() - before
        self.records[-1]["others"] += f"; {kib:+.0f} KiB, {descriptors:+.0f} descriptors"
        if self.side == "prefill":
            self.slots_held()
        return self.records

    def stopped(self) -> None:
        victims = self.rank.processes[0]
        victims.signal(signal.SIGSTOP)
        self.note(f"{self.each} are stopped", self.healthy())
        if self.side == "decode":
            self.asked()
        victims.signal(signal.SIGCONT)
        since = time.perf_counter()
        healthy = self.healthy()
        self.warm_again(self.victims)
        after = time.perf_counter() - since
        self.note(f"{self.each} go on", healthy, f"all warm after {after:.1f} s")

    def warm_again(self, peers: list[int]) -> None:
        """Wait until a room of each is."""
        while None in self.rank.run(peers, WINDOW):
            time.sleep(AGAIN_S)

    def asked(self) -> None:
        """Each tenth room is one of a rank that is stopped."""
        mixed = self.one.draw(self.rooms, self.each)
        mixed[::10] = self.one.random.choices(self.victims, k=len(mixed[::10]))
        found = self.rank.run(mixed, 16)
        theirs = found[::10]
        del found[::10]
        cold = f"{theirs.count(None)} of {len(theirs)} rooms cold"
        self.note(f"{self.each} are stopped, and asked", found, cold)

    def slots_held(self) -> None:
        """One by each reader, for good: three quarters of the slots, then all."""
        held = 3 * threads.SLOTS // 4
        self.rank.run(self.victims[:held], held, acknowledge=False)
        self.note(f"{held} of {threads.SLOTS} slots are never acknowledged", self.healthy())
        if len(self.victims) > threads.SLOTS:
            rest = self.victims[held : threads.SLOTS]
            self.rank.run(rest, len(rest), acknowledge=False)
            found = self.rank.run(self.one.draw(16, self.each), 16)
            self.note(f"{threads.SLOTS} of {threads.SLOTS} slots are never acknowledged", found)

    def restarted(self) -> None:
        """One process after the other, until all peers are others."""
        healthy, seconds = list[float | None](), list[float]()
        for number, process in enumerate(self.rank.processes):
            there = range(number * self.each, (number + 1) * self.each)
            others = [peer for peer in self.one.draw(self.each) if peer not in there]
            since = time.perf_counter()
            process.restart()
            if self.side == "decode":
                while gone := self.rank.gone(there):
                    self.rank.run(gone, WINDOW)
                    time.sleep(AGAIN_S)
                self.rank.connect(0)
            healthy += self.rank.run(others, 16)
            self.warm_again(list(there))
            seconds.append(time.perf_counter() - since)
        self.note(
            f"all are restarted, {self.each} at a time", healthy,
            f"warm again after {np.median(seconds):.1f} s, {max(seconds):.1f} s at most",
        )  # fmt: skip


# ---------------------------------------------------------------- profile


def profile(side: str, count: int, seconds: int) -> list[Record]:
    """Shares of the innermost function of ours; none without py-spy."""
    if shutil.which("py-spy") is None:
        return []
    one = Rank(side, count, PATIENT)
    one.rank.connect(count)
    with tempfile.NamedTemporaryFile() as out:
        spy = subprocess.Popen(
            ["py-spy", "record", "--pid", str(os.getpid()), "--rate", str(LOOKS), "--threads",
             "--duration", str(seconds), "--format", "raw", "--output", out.name],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while spy.poll() is None:
            one.rank.run(one.draw(10 * WINDOW), WINDOW)
        lines = Path(out.name).read_text().splitlines()
    looks: Counter[str] = Counter()
    for line in lines:
        stack, _, number = line.rpartition(" ")
        if one.rank.thread in stack:
            ours = [frame for frame in stack.split(";") if "sglang_mixkv/" in frame]
            name, _, file = ours[-1].partition(" (")
            looks[f"{file.partition('sglang_mixkv/')[2].partition(':')[0]} {name}"] += int(number)
    return [
        {"side": side, "peers": count, "code": name, "share": number / looks.total()}
        for name, number in looks.most_common(10)
    ]


def main() -> None:
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="figures,faults,profile", help="which to run")
    arguments = parser.parse_args()
    parts, quick = arguments.parts.split(","), arguments.quick
    most, each, rooms = (20, 10, 200) if quick else (COUNTS[-1], EACH, 4000)
    result = Result("peers", quick, {part: [] for part in parts})
    if "figures" in parts:
        counts = [1, most] if quick else list(COUNTS)
        turns = arguments.repeats or (1 if quick else 5)
        result.parts["figures"] = by_count(counts, rooms, turns)
    for side in KINDS:
        if "faults" in parts:
            print(side, "faults", file=sys.stderr)
            result.parts["faults"] += alone(lambda s=side: Faults(s, most, each, rooms // 4).all())
        if "profile" in parts:
            print(side, "profile", file=sys.stderr)
            result.parts["profile"] += alone(profile, side, most, 2 if quick else 10)
    result.finish(arguments)


if __name__ == "__main__":
    main()
