"""Measure a transfer of draft KV, as a + b x bytes, and what the plugin adds to SGLang's scheduler.

`lines`: a request of one chunk, from prefill's `send` until the draft KV is in place on all decode
ranks, over Mooncake's TCP. All ranks know the request when `send` is called. It takes turns with
one `transfer_sync_read` of as many bytes, by the engine of one decode rank from one prefill rank.
The drafter has 4 KiB per token over all its ranks: one layer of K and V, 8 heads of 256 bytes. For
each layout and size, all bytes are compared first.

`scheduler`: CPU time of the scheduler's thread in its calls for one request, on the first rank of
each side, in microseconds. Rings with and without the plugin take turns, request by request. Only
the poll that returns Success is counted, so no call waits for another process. `added us` is the
plugin's median minus stock's.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import rings
from common import Record, options, show, take_turns

from sglang_mixkv.channel import data_plane

DIRECTIONS = ((2, 1), (1, 2))
TOKENS = tuple(64 << step for step in range(10))  # 0.25 to 128 MiB
WAYS = ("stock", "channel")
RANKS = (2, 8)  # prefill ranks, to one decode rank
PAGES, PASSES = 16, 300


def bare(member: Any, size: int) -> float:
    """Read from the first prefill rank's staging buffer into the first decode rank's."""
    if member.rank:
        return 0.0
    store, server = member.manager.decode_channel._store, member.manager.servers._servers
    there = next(iter(server[member.address(0)].rows.values())).staging
    name = data_plane.decode(there.endpoint, "mooncake").session.decode()
    read, start = store.plane._engine.transfer_sync_read, time.perf_counter()
    assert read(name, store.staging.address, there.base, size) == 0
    return time.perf_counter() - start


def fill(member: Any) -> None:
    """Write to all of the staging buffer: an untouched page is read faster."""
    getattr(member.manager, f"{member.side}_channel")._store.staging._memory.fill_(1)


def measure(sizes: tuple[int, int], tokens: tuple[int, ...], count: int) -> list[Record]:
    """Measure one direction; return its records, one per layout."""
    found = list[Record]()
    with closing(rings.Ring("channel", *sizes, max(tokens))) as ring:
        for side in rings.SIDES:
            ring.ask(side, fill)
        for layout in rings.LAYOUTS:
            taken: dict[str, dict[int, list[float]]] = {"channel": {}, "bare": {}}
            for one in tokens:
                print(*sizes, layout, one, file=sys.stderr)
                size = one * rings.TOKEN_BYTES
                ring.check(one, layout)
                ways = {
                    "channel": partial(ring.transfer, one, layout),
                    "bare": lambda size=size: max(ring.ask("decode", bare, size)),
                }
                for way, seconds in take_turns(ways, count, 2).items():
                    taken[way][size] = seconds
            (a, b), (_, bare_b) = (line(seconds) for seconds in taken.values())
            found.append(
                {"direction": f"{sizes[0]} to {sizes[1]}", "layout": layout, "a ms": a * 1e3,
                 "GB/s": 1e-9 / b, "b to bare": b / bare_b}
            )  # fmt: skip
    return found


def line(seconds: dict[int, list[float]]) -> tuple[float, float]:
    """Fit seconds = a + b x bytes by least squares. Each sample is weighted by the inverse of its
    size's median, since noise grows with time."""
    x = np.concatenate([np.full(len(taken), size) for size, taken in seconds.items()])
    weight = np.concatenate([np.full(len(t), 1 / np.median(t)) for t in seconds.values()])
    b, a = np.polyfit(x, np.concatenate(list(seconds.values())), 1, w=weight)
    return float(a), float(b)


def scheduler(prefill_tp: int, passes: int) -> list[Record]:
    tokens = PAGES * rings.PAGE
    with rings.rings(WAYS, prefill_tp, 1, tokens) as made:
        ways = {way: partial(ring.request, tokens) for way, ring in made.items()}
        found = take_turns(ways, passes, passes // 5 + 1)
    records = list[Record]()
    for side in rings.SIDES:
        stock, mine = (1e6 * statistics.median(one[side] for one in found[way]) for way in WAYS)
        records.append(
            {"prefill ranks": prefill_tp, "side": side, "stock us": stock, "added us": mine - stock}
        )
    return records


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    quick, repeats = arguments.quick, arguments.repeats
    rings.load_sglang()
    tokens, count = TOKENS[:3] if quick else TOKENS, repeats or (3 if quick else 15)
    lines = [record for sizes in DIRECTIONS for record in measure(sizes, tokens, count)]
    passes = repeats or (10 if quick else PASSES)
    calls = [one for tp in (RANKS[:1] if quick else RANKS) for one in scheduler(tp, passes)]
    show(arguments, {"lines": lines, "scheduler": calls})


if __name__ == "__main__":
    main()
