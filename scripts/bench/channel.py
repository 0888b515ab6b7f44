"""Measure the cost of the draft channel itself, without a GPU or a NIC.

Both sides' threads, sockets, slots and machines are the real ones. Copies move no bytes and end at
once. Reads end at once (`control plane`), or one after another at 50 GB/s, the rate of a 400 Gb/s
NIC on prefill. Slots have the default size of 4 MiB, which holds 1,024 tokens of draft KV for
Kimi-K2's EAGLE3 drafter on one rank of TP 8.

`us per slot`: CPU time of each side's channel thread. `ms`: from a request's only chunk to the
verdict. `readers`: requests of random decode ranks at random times. `busy`: the same while another
thread runs pure Python.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import Record, options, show
from rig.channel import threads as rig

from sglang_mixkv.channel import loop
from sglang_mixkv.channel.data_plane import Extent, Read
from sglang_mixkv.channel.slots import slots_of
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.transfer import Source
from sglang_mixkv.draft.copier import Copier, Copy
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.slot_format import SlotCheck

HEADS, TIMES = range(64), Times(100)
SLOTS, SLOT = slots_of(256)
TOKEN = 16 << 10  # bytes of a token over all heads
TOKENS = (SLOT - 4096) // TOKEN  # per slot
NIC = 50e9  # bytes per second
REQUESTS = ((1, 1), (16, 1), (1024, 1), (1, 64), (16, 64))  # slots per request, concurrent requests
READERS, PROMPTS, RATES = (8, 72, 128), (8, 32), (5, 20)  # slots per request, requests per second
DRAWN = 40  # requests per row and turn
SETTLE_S = 0.02  # time for the last messages to be handled


class AtOnce(Copier):
    """Copies that end as soon as they are started."""

    is_alive, polled = True, False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.done = self._over

    def start(self, copies: Sequence[Copy]) -> None:
        self._over += [(copy, SlotCheck.OK, 0.0) for copy in copies]


class NoRows:
    """Rows with sizes but without bytes."""

    pack = unpack = clear = staticmethod(lambda *_: None)
    heads, bytes_per_head, device = HEADS, TOKEN // len(HEADS), SimpleNamespace(index=None)

    def use_device(self) -> None: ...

    def packed_bytes(self, tokens: int, heads: int) -> int:
        return 64 + tokens * heads * self.bytes_per_head


class Plane(rig.Reads):
    """Reads one after another, at `pace` bytes per second over all ranks."""

    lock, free = threading.Lock(), 0.0

    def __init__(self, pace: float) -> None:
        super().__init__()
        self._pace = pace

    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        seconds = sum(length for _, _, length in extents) / self._pace
        with Plane.lock:
            read.handle = Plane.free = max(Plane.free, time.perf_counter()) + seconds

    def _check(self, read: Read) -> str | None:
        return "" if time.perf_counter() >= read.handle else None


class Fleet:
    """A prefill rank and `readers` decode ranks."""

    def __init__(self, pace: float, readers: int = 1) -> None:
        staging = SimpleNamespace(
            address=1 << 30, slot_bytes=SLOT, count=SLOTS, size=SLOTS * SLOT, slot=lambda _: None
        )
        given = {"rows": NoRows(), "staging": staging}
        prefill = rig.Prefill(TIMES, plane=Plane(pace), **given)
        decode = [rig.Decode(TIMES, plane=Plane(pace), **given) for _ in range(readers)]
        self._sides, self._prefill = (prefill, *decode), prefill.channel
        for worker in [side.channel for side in self._sides]:
            worker._copies._work.put(None)
            worker._copies = AtOnce(worker._store, worker._reporter.moved)
        self._readers = [
            (side, Source(side.reach(prefill.row), HEADS, 1, SLOTS, TOKENS)) for side in decode
        ]
        rig.wait_for(lambda: all(of.peer in side.channel._links for side, of in self._readers))
        self._rooms, self._draw = itertools.count(1), random.Random(readers)

    def run(
        self, slots: int, starts: Sequence[float] = (0,), readers: int = 1
    ) -> tuple[list[float], list[float]]:
        """Run requests of `slots` full slots at the seconds `starts`, each by a random one of
        `readers` ranks. Return the seconds from each chunk to its verdict, and the CPU seconds of
        prefill's and the first reader's channel threads."""
        pages, made = np.arange(slots * TOKENS), []
        for room, _ in zip(self._rooms, starts, strict=False):
            side, source = self._draw.choice(self._readers[:readers])
            handle = side.open(room, len(pages), b"", source=source, pages=pages, page=1)
            made.append((self._prefill.begin(room), side.channel, handle))
        time.sleep(SETTLE_S)
        began, cpu = time.perf_counter(), self._cpu()
        for start, (sent, decode, handle) in zip(starts, made, strict=True):
            if start:  # or all at once
                time.sleep(max(0.0, began + start - time.perf_counter()))
            decode.target_arrived(handle)
            self._prefill.add_chunk(sent, 0, len(pages), True, Pages(pages, 1))
        for *_, handle in made:
            while handle.state is None:
                time.sleep(1e-3)
            assert handle.state is act.State.WARM
        time.sleep(SETTLE_S)
        spent = [after - before for before, after in zip(cpu, self._cpu(), strict=True)]
        for sent, decode, handle in made:
            self._prefill.end(sent)
            decode.close(handle)
        time.sleep(SETTLE_S)
        return [handle.waited for *_, handle in made], spent

    def _cpu(self) -> list[float]:
        threads = [side.channel._thread for side in self._sides[:2]]
        return [time.clock_gettime(time.pthread_getcpuclockid(one.ident)) for one in threads]

    def close(self) -> None:
        for side in self._sides:
            side.close()


def control_plane(slots: int, requests: int, repeats: int) -> Record:
    """Measure each thread's CPU time per slot, for concurrent `requests` of `slots` slots each."""
    pair, found = Fleet(math.inf), []
    pair.run(slots, [0] * requests)
    for _ in range(repeats):
        spent = pair.run(slots, [0] * requests)[1]
        found.append([cpu / (slots * requests) * 1e6 for cpu in spent])
    pair.close()
    prefill, decode = (statistics.median(side) for side in zip(*found, strict=True))
    return {
        "slots": slots, "requests": requests,
        "prefill us per slot": prefill, "decode us per slot": decode,
    }  # fmt: skip


def paced(slots: int, repeats: int) -> Record:
    pair = Fleet(NIC)
    pair.run(slots)
    found = [pair.run(slots)[0][0] * 1e3 for _ in range(repeats)]
    pair.close()
    wire = slots * (64 + TOKENS * TOKEN) / NIC * 1e3
    return {"slots": slots, "ms": statistics.median(found), "ms on the wire": wire}


def readers(repeats: int, drawn: int) -> list[Record]:
    """Measure the rows in several turns, each in a random order."""
    rows = [*itertools.product(RATES, PROMPTS, ("", "busy"), READERS)]
    found: dict[Any, list[float]] = {row: [] for row in rows}
    loop.TICK = 60.0  # so that idle ranks' ticks do not take the GIL from others
    ranks, draw, busy = Fleet(NIC, max(READERS)), random.Random(drawn), threading.Event()
    threading.Thread(target=spin, args=(busy,), daemon=True).start()
    for row in [one for _ in range(repeats) for one in draw.sample(rows, len(rows))]:
        rate, slots, is_busy, count = row
        starts = itertools.accumulate(draw.expovariate(1) / rate for _ in range(drawn))
        (busy.set if is_busy else busy.clear)()
        found[row] += ranks.run(slots, [*starts], count)[0]
    busy.clear()
    ranks.close()
    names = "requests a second", "slots", "GIL", "readers", "p50 ms", "p99 ms"
    return [
        dict(zip(names, (*row, *np.quantile(one, (0.5, 0.99)) * 1e3), strict=True))
        for row, one in found.items()
    ]


def spin(busy: threading.Event) -> None:
    while busy.wait():
        for _ in range(10_000):
            pass


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    repeats = arguments.repeats or (1 if arguments.quick else 15)
    parts = {
        "control plane": [control_plane(*one, repeats) for one in REQUESTS],
        "paced": [paced(slots, repeats) for slots in (1, 16, 64)],
        "readers": readers(-(-repeats // 3), 3 if arguments.quick else DRAWN),
    }
    show(arguments, parts)


if __name__ == "__main__":
    main()
