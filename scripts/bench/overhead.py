"""What the plugin adds to the threads of SGLang's schedulers.

Rings with and without it stand side by side and take turns, request by request, so the machine's
mood hits all alike. Counted are the seconds of the scheduler's own thread (time.thread_time) in the
calls that it makes for one request, on the first rank of each side; beside it the seconds by the
clock, which other threads and processes lengthen. A request is polled while it waits, and once more
when everything is there, so that no call waits for another process.

    decode    get_kv_class and init, send_metadata, last poll, clear
    prefill   get_kv_class, init, send, last poll, get_transfer_metric, clear

`added` is a way's median minus stock's; its interval of 95 % is a bootstrap's over the turns.
`own threads`: what the channel's threads took of a processor meanwhile, the mean of a request.
`beside` (beside.py): what of a busy thread's speed is left while the channel's threads poll.
"""

from __future__ import annotations

import sys
from typing import Any

import beside
import numpy as np
import rings
from common import Check, Record, Result, interval, options
from members import PAGE, SIDES, Meter

RANKS = (2, 4, 8)  # of prefill, to one of decode
PAGES = 16
POLLS, PASSES, AWAITED = 20, 300, 30
CALLS = {
    "prefill": ("made", "init", "send", "last poll", "metric", "clear"),
    "decode": ("init", "send_metadata", "last poll", "clear"),
}
DECODE_US, RANK_US, PREFILL_US, POLL_US = 60.0, 8.0, 40.0, 4.0
LEFT = 0.98

Passes = dict[tuple[str, str], list[Record]]  # by way and side; microseconds


def measure(prefill_tp: int, passes: int) -> tuple[list[Record], list[Record]]:
    """Medians of each call, and what is added to stock's."""
    tokens = PAGES * PAGE
    taken: Passes = {(way, side): [] for way in rings.WAYS for side in SIDES}
    with rings.rings(rings.WAYS, prefill_tp, 1, "mooncake", tokens) as made:
        channel = made["channel"]
        for turn in range(-(passes // 5) - 1, passes):
            if turn == 0:
                before = {side: channel.ask(side, "own_threads")[0] for side in SIDES}
            for way in np.random.default_rng(turn + passes).permutation(rings.WAYS):
                meters = made[way].calls(tokens, POLLS)
                for side, meter in zip(SIDES, meters, strict=True):
                    if turn >= 0:  # the ones before warm up
                        taken[way, side].append(of_meter(side, meter))
        own = {
            side: (channel.ask(side, "own_threads")[0] - before[side]) / passes * 1e6
            for side in SIDES
        }
        awaited = [channel.awaited_poll(tokens, POLLS) for _ in range(min(passes, AWAITED))]
    for record, seconds in zip(taken["channel", "decode"], awaited, strict=False):
        record["awaited poll"] = seconds * 1e6
    head = {"prefill_tp": prefill_tp, "decode_tp": 1, "pages": PAGES}
    calls = [
        {**head, "side": side, "way": way, **medians(found),
         "own_threads_us": own[side] if way == "channel" else 0.0}
        for (way, side), found in taken.items()
    ]  # fmt: skip
    added = [
        {**head, "side": side, "way": way, **added_to(found, taken["stock", side])}
        for (way, side), found in taken.items()
        if way != "stock"
    ]
    return calls, added


def of_meter(side: str, meter: Meter) -> Record:
    """Microseconds of the thread in each call and the request, of the clock in the latter."""
    calls = CALLS[side]
    found = {name: meter.thread[name] * 1e6 for name in (*calls, "poll")}
    found["request"] = sum(found[name] for name in calls)
    found["request, clock"] = sum(meter.clock[name] for name in calls) * 1e6
    return found


def medians(found: list[Record]) -> Record:
    names = dict.fromkeys(name for one in found for name in one)
    return {
        f"{name}_us": float(np.median([one[name] for one in found if name in one]))
        for name in names
    }


def added_to(found: list[Record], stock: list[Record]) -> Record:
    """Of a request, of a poll that waits, and of one that waits for draft KV alone."""
    record: Record = {}
    for name, base in (
        ("request", "request"), ("request, clock", "request, clock"), ("poll", "poll"),
        ("awaited poll", "poll"),
    ):  # fmt: skip
        mine = np.array([one[name] for one in found if name in one])
        theirs = np.array([one[base] for one in stock])
        if len(mine):
            low, high = interval(of_medians, mine, theirs)
            record |= {
                f"{name}_us": of_medians(mine, theirs),
                f"{name}_low": low,
                f"{name}_high": high,
            }
    return record


def of_medians(mine: Any, theirs: Any) -> float:
    return float(np.median(mine) - np.median(theirs))


def checks(parts: dict[str, list[Record]]) -> list[Check]:
    found = []
    channel = [one for one in parts["added"] if one["way"] == "channel"]
    decode, prefill = (
        {one["prefill_tp"]: one for one in channel if one["side"] == side}
        for side in ("decode", "prefill")
    )
    least, most = min(decode), max(decode)
    first, last = (decode[tp]["request_us"] for tp in (least, most))
    found.append(Check(f"decode, {least} to 1: us added to a request", DECODE_US, first))
    if most > least:
        a_rank = (last - first) / (most - least)
        found.append(Check("decode: us added by each further rank", RANK_US, a_rank))
    found.append(Check("prefill: us added to a request", PREFILL_US, prefill[least]["request_us"]))
    for side, of in (("decode", decode), ("prefill", prefill)):
        worst = max(one["poll_us"] for one in of.values())
        found.append(Check(f"{side}: us added to a poll that waits", POLL_US, worst))
    worst = max(one["awaited poll_us"] for one in decode.values())
    found.append(Check("decode: us added to a poll that waits for draft KV", POLL_US, worst))
    for one in parts["beside"]:
        what = f"{one['thread']} beside {one['while']}, {one['backend']}: share of its speed"
        found.append(Check(what, LEFT, one["left"], at_most=False))
    return found


def main() -> None:
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="calls,beside", help="which to run")
    arguments = parser.parse_args()
    passes = arguments.repeats or (10 if arguments.quick else PASSES)
    parts = arguments.parts.split(",")
    result = Result("overhead", arguments.quick, {"added": [], "calls": [], "beside": []})
    if "beside" in parts:  # without SGLang's modules: UCX reads its variables when it is loaded
        result.parts["beside"] = beside.measure(arguments.quick)
    rings.load_sglang()
    for tp in (RANKS[:1] if arguments.quick else RANKS) if "calls" in parts else ():
        print(tp, "to 1", file=sys.stderr)
        calls, added = measure(tp, passes)
        result.parts["calls"] += calls
        result.parts["added"] += added
    if result.parts["added"]:
        result.checks = checks(result.parts)
    result.finish(arguments)


if __name__ == "__main__":
    main()
