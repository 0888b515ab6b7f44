"""What the plugin costs SGLang's schedulers per request: stock, ours, beside a refused server.

A real decode rank of the protocol ring, in a process of its own; its prefill servers are real
bootstrap servers with sockets that only listen (tests/rig/stand_ins.py). One pass is
what the scheduler calls for one request of a healthy server: get_kv_class, the receiver is made,
init, send_metadata, poll while it waits, poll when it has succeeded, clear. senders.py: prefill's.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from common import Check, Record, Result, alone, elapsed, options

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
load = importlib.import_module("rig.load")  # sets what SGLang's import reads
senders = importlib.import_module("senders")

PREFILL_TP = (2, 8)  # to 1
PAGES = (128, 2048)
POLLS, REFUSED, PASSES = 20, 1000, 500
TURNS = 7  # of stock and ours, each in new processes: a machine's speed changes within seconds
CALLS = ("init", "send_metadata", "poll", "last_poll", "clear")


class Passes:
    """Passes of healthy requests; seconds of each call."""

    def __init__(self, server: Any, pages: int) -> None:
        self.server, self.manager = server, server.rank.manager
        self.room = 10_000
        self.pages = np.arange(pages, dtype=np.int32)

    def one(self) -> dict[str, float]:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.room += 1
        rank = self.server.rank
        taken: dict[str, float] = {}

        def begin() -> None:
            made = rank.asked_class("receiver")
            taken["receiver"] = made(self.manager, self.server.address, self.room)
            taken["receiver"].init(0)

        taken["init"] = elapsed(begin)
        receiver = taken.pop("receiver")
        taken["send_metadata"] = elapsed(lambda: receiver.send_metadata(self.pages, 0))
        taken["poll"] = elapsed(lambda: [receiver.poll() for _ in range(POLLS)]) / POLLS
        self.manager.update_status(self.room, KVPoll.Success)
        taken["last_poll"] = elapsed(receiver.poll)
        taken["clear"] = elapsed(receiver.clear)
        return taken

    def many(self, count: int) -> Record:
        """Medians in microseconds, of each call and of the pass; a pass's 99th percentile."""
        found = [self.one() for _ in range(count)]
        sums = [sum(one.values()) for one in found]
        calls = {f"{name}_us": 1e6 * float(np.median([o[name] for o in found])) for name in CALLS}
        tail = 1e6 * float(np.percentile(sums, 99))
        return {**calls, "pass_us": 1e6 * float(np.median(sums)), "p99_us": tail}


def healthy(tp: int, pages: int, passes: int, *, mixkv: bool) -> Passes:
    from rig.stand_ins import StandIn, decode_rank

    rank = decode_rank(pages, mixkv=mixkv)
    found = Passes(StandIn(rank, tp, fits=True, by_room=True), pages)
    found.server.resolve()
    found.many(passes // 5 + 1)
    return found


def calls(tp: int, pages: int, passes: int, *, mixkv: bool) -> list[Record]:
    """A rank's calls per request."""
    who = "mixkv" if mixkv else "stock"
    return [{"prefill_tp": tp, "decode_tp": 1, "pages": pages, "plugin": who,
             **healthy(tp, pages, passes, mixkv=mixkv).many(passes)}]  # fmt: skip


def refusing(tp: int, passes: int, refused: int) -> list[Record]:
    """Passes before and right after many requests to a refused server; what these cost."""
    from rig.stand_ins import StandIn

    passing = healthy(tp, PAGES[0], passes, mixkv=True)
    manager = passing.manager
    other = StandIn(passing.server.rank, fits=False, by_room=True)
    before = passing.many(passes)
    each = [elapsed(lambda n=n: _refused(other, n)) for n in range(refused)]
    after = passing.many(passes)
    executor = manager._ensure_prefill_recompute_executor()
    answer = elapsed(lambda: executor.submit(time.monotonic).result(60))
    common = {"prefill_tp": tp, "decode_tp": 1, "refused": refused}
    return [
        {**common, "when": "before", **before},
        {**common, "when": "after", **after},
        {**common, "when": "while", "ratio": after["pass_us"] / before["pass_us"],
         "refused_ms": 1e3 * float(np.mean(each[1:])), "first_ms": 1e3 * each[0],
         "executor_ms": 1e3 * answer},
    ]  # fmt: skip


def _refused(server: Any, number: int) -> None:
    """One refused request, from the scheduler's first look at its server to its end."""
    receiver = server.request(number)
    receiver.poll()
    with suppress(Exception):
        receiver.failure_exception()


def in_turns(turns: int, passes: int) -> dict[str, list[Record]]:
    """Passes of both sides, of stock and ours one after the other, whichever is first."""
    found: dict[str, list[Record]] = {"calls": [], "senders": []}
    for turn in range(turns):
        for tp, pages in itertools.product(PREFILL_TP, PAGES):
            for mixkv in (False, True) if turn % 2 else (True, False):
                found["calls"] += alone(calls, tp, pages, passes, mixkv=mixkv)
                found["senders"] += [senders.calls(tp, pages, passes, mixkv=mixkv)]
    return found


def quickest(records: list[Record]) -> list[Record]:
    """The least of the turns' figures, by sizes, pages and plugin: what others on the machine
    take only adds."""
    names = ("prefill_tp", "decode_tp", "pages", "plugin")
    by_case: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        by_case.setdefault(tuple(record[name] for name in names), []).append(record)
    return [
        {
            name: value if name in names else min(one[name] for one in case)
            for name, value in case[0].items()
        }
        for case in by_case.values()
    ]


def checks(parts: dict[str, list[Record]]) -> list[Check]:
    last = parts["refusing"][-1]
    return [
        *(one for tp in PREFILL_TP for pages in PAGES for one in _against_stock(parts, tp, pages)),
        Check("a pass after 1,000 refused requests to one before", 1.1, last["ratio"]),
        Check("a refused request, ms of the caller's thread", 0.5, last["refused_ms"]),
        Check("SGLang's own executor answers within, ms", 1000, last["executor_ms"]),
    ]


def _against_stock(parts: dict[str, list[Record]], tp: int, pages: int) -> list[Check]:
    (ours, stock), (sender, of_stock) = (_both(parts[n], tp, pages) for n in ("calls", "senders"))
    what = f"to stock's, {tp} to 1, {pages} pages"
    return [
        Check(f"init, send_metadata and last poll {what}", 1.25, _share(ours) / _share(stock)),
        Check(f"poll {what}", 1.2, ours["poll_us"] / stock["poll_us"]),
        Check(f"the sender's calls {what}", 1.25, sender["sender_us"] / of_stock["sender_us"]),
        Check(f"the sender's poll {what}", 1.2, sender["poll_us"] / of_stock["poll_us"]),
    ]


def _both(records: list[Record], tp: int, pages: int) -> tuple[Record, Record]:
    """Ours and stock's."""
    both = {r["plugin"]: r for r in records if (r["prefill_tp"], r["pages"]) == (tp, pages)}
    return both["mixkv"], both["stock"]


def _share(record: Record) -> float:
    return float(record["init_us"] + record["send_metadata_us"] + record["last_poll_us"])


def plot(result: Result, pyplot: Any) -> None:
    records = result.parts["calls"]
    labels = [f"{r['prefill_tp']} to 1\n{r['pages']} pages\n{r['plugin']}" for r in records]
    bottom = np.zeros(len(records))
    for name in CALLS:
        values = np.array([r[f"{name}_us"] for r in records])
        pyplot.bar(labels, values, bottom=bottom, label=name)
        bottom += values
    pyplot.legend()
    pyplot.ylabel("us per request")


def main() -> None:
    arguments = options((__doc__ or "").splitlines()[0]).parse_args()
    passes = arguments.repeats or (20 if arguments.quick else PASSES)
    result = Result("scheduler", arguments.quick, {"calls": [], "senders": [], "refusing": []})
    load.load_sglang()
    for name, part in in_turns(1 if arguments.quick else TURNS, passes).items():
        result.parts[name] = quickest(part)
    refused = 50 if arguments.quick else REFUSED
    result.parts["refusing"] = alone(refusing, 2, passes, refused)
    result.checks = checks(result.parts)
    result.finish(arguments, lambda pyplot: plot(result, pyplot))


if __name__ == "__main__":
    main()
