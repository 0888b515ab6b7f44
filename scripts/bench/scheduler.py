"""What the plugin adds to the thread of SGLang's scheduler, in microseconds of a processor.

Rings with the plugin and without it take turns, request by request. Counted is the thread's own
time in the calls that the scheduler makes for one request on the first rank of each side. A request
is polled while it waits, and once more when everything is there, so that no call waits for another
process.

    decode    get_kv_class and init, send_metadata, last poll, clear
    prefill   get_kv_class, init, send, last poll, get_transfer_metric, clear

`added` is the plugin's median minus stock's, with its interval of 95 %.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import rings
from common import Parts, Record, interval, options, show

WAYS = ("stock", "channel")
RANKS = (2, 8)  # of prefill, to one of decode
PAGES, POLLS, PASSES = 16, 20, 300
CALLS = {
    "prefill": ("made", "init", "send", "last poll", "metric", "clear"),
    "decode": ("init", "send_metadata", "last poll", "clear"),
}


def measure(prefill_tp: int, passes: int) -> list[Record]:
    tokens, order = PAGES * rings.PAGE, np.random.default_rng(passes)
    taken: dict[tuple[str, str, str], list[float]] = {}
    with rings.rings(WAYS, prefill_tp, 1, tokens) as made:
        for turn in range(-(passes // 5) - 1, passes):
            for way in order.permutation(WAYS):
                for side, cpu in made[way].calls(tokens, POLLS).items():
                    cpu["request"] = sum(cpu[name] for name in CALLS[side])
                    for name, seconds in cpu.items() if turn >= 0 else ():  # the others warm up
                        taken.setdefault((side, name, way), []).append(seconds * 1e6)
    found = []
    for side, calls in CALLS.items():
        for name in ("request", "poll", *calls):
            stock, mine = (taken[side, name, way] for way in WAYS)
            low, high = interval(added, mine, stock)
            found.append(
                {"prefill ranks": prefill_tp, "side": side, "call": name,
                 "stock us": np.median(stock), "added us": added(mine, stock),
                 "low": low, "high": high}
            )  # fmt: skip
    return found


def added(mine: Any, stock: Any) -> float:
    return float(np.median(mine) - np.median(stock))


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    parts: Parts = {"scheduler": []}
    rings.load_sglang()
    for tp in RANKS[:1] if arguments.quick else RANKS:
        print(tp, "to 1", file=sys.stderr)
        parts["scheduler"] += measure(tp, arguments.repeats or (10 if arguments.quick else PASSES))
    show(arguments, parts)


if __name__ == "__main__":
    main()
