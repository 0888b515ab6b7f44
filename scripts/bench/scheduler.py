"""Measure what the plugin adds to SGLang's scheduler thread, in microseconds of CPU time.

Rings with and without the plugin take turns, request by request. The figure is the thread's own
time in the scheduler's calls for one request, on the first rank of each side. Only the poll that
returns Success is counted, so no call waits for another process. `added us` is the plugin's median
minus stock's.
"""

from __future__ import annotations

import sys

import numpy as np
import rings
from common import Record, options, show

WAYS = ("stock", "channel")
RANKS = (2, 8)  # prefill ranks, to one decode rank
PAGES, PASSES = 16, 300


def measure(prefill_tp: int, passes: int) -> list[Record]:
    tokens, order = PAGES * rings.PAGE, np.random.default_rng(passes)
    taken: dict[str, dict[str, list[float]]] = {"prefill": {}, "decode": {}}
    with rings.rings(WAYS, prefill_tp, 1, tokens) as made:
        for turn in range(-(passes // 5) - 1, passes):
            for way in order.permutation(WAYS):
                for side, seconds in made[way].request(tokens).items():
                    if turn >= 0:  # earlier turns warm up
                        taken[side].setdefault(way, []).append(seconds * 1e6)
    found = []
    for side, by_way in taken.items():
        stock, mine = (float(np.median(by_way[way])) for way in WAYS)
        found.append(
            {"prefill ranks": prefill_tp, "side": side, "stock us": stock, "added us": mine - stock}
        )
    return found


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    found = list[Record]()
    rings.load_sglang()
    for tp in RANKS[:1] if arguments.quick else RANKS:
        print(tp, "to 1", file=sys.stderr)
        found += measure(tp, arguments.repeats or (10 if arguments.quick else PASSES))
    show(arguments, {"scheduler": found})


if __name__ == "__main__":
    main()
