"""What peers cost the channel thread of one rank: a decode rank with so many prefill ranks, and a
prefill rank with so many readers.

The rank's threads and sockets are real; processes of EACH stand in for its peers. Rooms are of
random peers, and have one segment of a few tokens, so that no time is spent in copies. A room is
three messages: OPEN, READY, ACK. `us a message` and `rooms/s` count the CPU time of the channel
thread; `first READY` is by the clock, with one room at a time.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing as mp
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Parts, Record, options, show

from sglang_mixkv.channel.times import Times

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
rig = importlib.import_module("rig.threads")
rig.SLOTS = 64  # as many as a rank has
peers = importlib.import_module("rig.peers")

KINDS = {"decode": peers.DecodeRank, "prefill": peers.PrefillRank}
COUNTS, EACH, WINDOW, ROOMS, MESSAGES = (1, 1000), 100, 64, 4000, 3
PATIENT = Times(10)  # a cold room is no figure


def usage() -> Any:
    """KiB and descriptors of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kib = pages * os.sysconf("SC_PAGESIZE") / 1024
    return np.array([kib, len(os.listdir("/proc/self/fd"))])


def figures(side: str, count: int, rooms: int) -> Record:
    rank: Any = KINDS[side](count, EACH, PATIENT)
    (thread,) = (t for t in threading.enumerate() if t.name == rank.thread)
    clock, draw = time.pthread_getcpuclockid(int(thread.ident or 0)), random.Random(count)
    rank.connect(1)
    rank.run([0] * 20, 1)
    before = usage()
    rank.connect(count - 1)
    kib, descriptors = usage() - before
    first = rank.run([draw.randrange(count) for _ in range(rooms // 4)], 1)
    cpu = time.clock_gettime(clock)
    rank.run([draw.randrange(count) for _ in range(rooms)], WINDOW)
    seconds = (time.clock_gettime(clock) - cpu) / rooms
    middle, most = np.percentile(np.array(first, float) * 1e3, [50, 99])
    record = {
        "us a message": seconds / MESSAGES * 1e6, "rooms/s": 1 / seconds,
        "first READY p50 ms": float(middle), "first READY p99 ms": float(most),
    }  # fmt: skip
    if count > 1:
        record |= {"KiB a peer": kib / (count - 1), "descriptors a peer": descriptors / (count - 1)}
    return record


def alone(pipe: Any, *args: Any) -> None:
    """In a process of its own, which ends whatever its threads do: a process has one rank."""
    pipe.send(figures(*args))
    os._exit(0)


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    quick = arguments.quick
    taken: dict[tuple[str, int], list[Record]] = {}
    cells = [(side, count) for side in KINDS for count in ((1, 20) if quick else COUNTS)]
    for turn in range(arguments.repeats or (1 if quick else 5)):
        for cell in random.Random(turn).sample(cells, len(cells)):
            print(turn, *cell, file=sys.stderr)
            here, there = mp.Pipe()
            process = mp.get_context("fork").Process(
                target=alone, args=(there, *cell, 200 if quick else ROOMS)
            )
            process.start()
            there.close()
            taken.setdefault(cell, []).append(here.recv())
            process.join()
    parts: Parts = {"peers": []}
    for (side, count), found in sorted(taken.items()):
        medians = {name: float(np.median([one[name] for one in found])) for name in found[0]}
        parts["peers"].append({"side": side, "peers": count, **medians})
    show(arguments, parts)


if __name__ == "__main__":
    main()
