"""Draft slices over Mooncake TCP or NIXL: packed, direct and stock's way, against one plain write.

Two processes on loopback. The sender's process runs the product's ChunkWriter for each
sender in turn (their times add up: real senders would overlap), the receiver's runs the
product's Landing. A sample of a method is, in seconds:

    plan + pack + wire    ChunkWriter.write of every sender (plan: what is left of it)
    signal                from the last sender's word, by ZMQ, until the receiver reads it
    scatter               region into the pool, where there is a region

The plain write is one contiguous range of the same bytes, without plan and signal. Methods
take turns; the first and the last turn start from a pool of canaries and end with a
comparison of every byte of it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import cases
import numpy as np
from cases import Case, page_tables
from common import (
    MOONCAKE_ENV,
    Check,
    Record,
    Result,
    Samples,
    geomean,
    interleave,
    machine,
    merged,
    options,
    ratio,
    repeats,
    worst,
)
from methods import AT_ONCE, STAGING, WHOLE_LAYERS, Run, Sender, pair
from wires import ENGINES

from sglang_mixkv.kv.plan import Copies, Plan, Reach
from sglang_mixkv.prefill.writer import Chunk

LARGEST = STAGING  # bytes of a case; beyond it no region could be granted
MOST_RANGES = 33_000  # a method that needs more is skipped: a second a sample, and more
AT_ONCE_RUNS = 5
WHOLE_LIMIT, TARGET_LIMIT = 1.05, 1.02
MANY_RANGES = 1000  # a method of more is timed in turns of its own, FEW times: it takes as long as
FEW = 9  # dozens of the others, and they would start from what it left in the caches


# ---------------------------------------------------------------- slices alone


Methods = dict[str, Callable[[Samples], Any]]


def slice_methods(run: Run, choice: str) -> tuple[Methods, Methods]:
    """The methods of a case, those of many ranges by themselves, without those of an absurd
    number, and without a region where `auto` would not grant one."""
    case, few, many = run.case, {"plain": run.plain}, {"plain": run.plain}
    tokens = cases.ENTRIES * case.tokens * case.senders
    gather = case.direction == "gather"
    ways = {
        "packed": 0 if gather else case.draft_bytes // case.run_bytes,
        "region": 1 if choice == "region" else 0,
        "by page": tokens // case.page_size if gather and case.page_size > 1 else 0,
        "direct": tokens,
    }
    for way, ranges in ways.items():
        if 0 < ranges <= MOST_RANGES:
            found = many if ranges > MANY_RANGES and way != choice else few
            found[way] = lambda samples, way=way: run.product(samples, way)
    if tokens <= MOST_RANGES:
        many["stock"] = run.stock
    return few, many


def auto_choice(run: Run) -> str:
    """What `auto` does with this case."""
    granted, _ = run.sender.remote.grant(0, "region")
    run.sender.remote.done(0)
    for grant in granted.values():
        return "region" if grant.tokens else "by page"
    case = run.case
    if case.direction == "gather" or case.draft_bytes // case.run_bytes > MOST_RANGES:
        return "direct"
    packed = any(one.packed_bytes for one in run.product(Samples(), "auto"))
    return "packed" if packed else "direct"


def measure_slices(sender: Sender, case: Case, count: int) -> list[Record]:
    """One record a method. Raises RuntimeError when bytes are wrong or a call failed."""
    run = Run(sender, case)
    choice = auto_choice(run)
    few, many = slice_methods(run, choice)
    timed = {name: method for name, method in (few | many).items() if name != "plain"}
    run.plain(Samples())
    wrong = {name: run.checked(method) for name, method in timed.items()}
    slow = interleave(many, min(count, FEW)) if len(many) > 1 else {}
    samples = interleave(few, count)
    wrong |= {f"{name}, last": run.checked(method) for name, method in timed.items()}
    if any(wrong.values()) or run.codes:
        raise RuntimeError(f"{case}: wrong bytes {wrong}, return codes {run.codes}")
    slow_plain = slow.pop("plain", Samples())
    return [
        *(_record(case, name, taken, samples["plain"], choice) for name, taken in samples.items()),
        *(_record(case, name, taken, slow_plain, choice) for name, taken in slow.items()),
    ]


def _record(case: Case, name: str, taken: Samples, plain: Samples, choice: str) -> Record:
    return {
        "direction": case.direction, "senders": case.senders, "tokens": case.tokens,
        "page_size": case.page_size, "layout": case.layout, "heads": case.heads,
        "bytes": case.draft_bytes, "method": name, "auto": choice,
        **taken.record(), "ratio": ratio(taken, plain),
    }  # fmt: skip


def slice_cases(quick: bool) -> list[Case]:
    kinds = [("gather", 2), ("gather", 4), ("scatter", 1)]
    tokens = (64, 512) if quick else (64, 512, 4096, 8192, 32768)
    page_sizes = (16,) if quick else (1, 16, 64)
    layouts, heads = ("contiguous", "random"), (1,) if quick else (1, 4)
    every = product(kinds, tokens, page_sizes, layouts, heads)
    found = [Case(*kind, t, p, where, h) for kind, t, p, where, h in every]
    return [case for case in found if case.draft_bytes <= LARGEST]


# ---------------------------------------------------------------- a whole request


def whole_cases(quick: bool) -> list[Case]:
    layers, sizes = (3, (512,)) if quick else (WHOLE_LAYERS, (1024, 4096))
    kinds = [("gather", 2), ("scatter", 1)]
    every = product(kinds, sizes, ("contiguous", "random"))
    return [Case(*kind, tokens, 64, where, 1, layers) for kind, tokens, where in every]


def measure_whole(sender: Sender, case: Case, count: int) -> list[Record]:
    """MLA rows of all layers with the draft slices, against MLA rows alone, and those against
    the same by SGLang's own plan."""
    run = Run(sender, case)
    alone = [Plan(p.page_size, p.target, (Reach(0, Copies.empty()),), p.src_pages, p.dst_pages)
             for p in run.plans[:1]]  # fmt: skip
    way = "region" if case.direction == "gather" or case.layout == "random" else "packed"
    methods: dict[str, Callable[[Samples], Any]] = {
        "MLA alone": lambda samples: run.product(samples, "auto", alone),
        "with draft slices": lambda samples: run.product(samples, way),
        "with direct slices": lambda samples: run.product(samples, "direct"),
    }
    wrong = {name: run.checked(methods[name]) for name in list(methods)[1:]}
    slow = {name: methods[name] for name in ("MLA alone", "with direct slices")}
    few = interleave(slow, min(count, FEW))
    del methods["with direct slices"]
    if sender.stock is not None:
        methods["MLA alone, stock's plan"] = run.stock_target
    samples = interleave(methods, count)
    if any(wrong.values()) or run.codes:
        raise RuntimeError(f"{case}: wrong bytes {wrong}, return codes {run.codes}")
    return [
        {"direction": case.direction, "senders": case.senders, "tokens": case.tokens,
         "layers": case.mla_layers, "page_size": case.page_size, "layout": case.layout,
         "method": name, **taken.record(), "ratio": ratio(taken, base)}
        for name, taken, base in (
            *((name, taken, samples["MLA alone"]) for name, taken in samples.items()),
            ("with direct slices", few["with direct slices"], few["MLA alone"]),
        )
    ]  # fmt: skip


# ---------------------------------------------------------------- eight at once


def at_once_cases(quick: bool) -> list[Case]:
    """The last two need more than the receiver's buffer: what finds no room goes by page."""
    tokens, more = (512, 16) if quick else (32768, 4)
    kinds = product([("gather", 2), ("scatter", 1)], ("contiguous", "random"))
    found = [Case(*kind, tokens, 64, where, 1, 0, AT_ONCE) for kind, where in kinds]
    wide = [Case("gather", 2, tokens, size, "random", more, 0, AT_ONCE) for size in (16, 64)]
    return found + (wide[:1] if quick else wide)


def measure_at_once(sender: Sender, case: Case) -> Record:
    """The run in the middle of several, after one that touches all memory for the first time.
    Codes and wrong bytes of all of them."""
    run = Run(sender, case)
    runs = [all_at_once(run) for _ in range(1 + AT_ONCE_RUNS)]
    middle = sorted(runs[1:], key=lambda record: record["ratio"])[AT_ONCE_RUNS // 2]
    codes = sorted({code for record in runs for code in record["codes"]})
    return {**middle, "codes": codes, "wrong_bytes": sum(r["wrong_bytes"] for r in runs)}


def all_at_once(run: Run) -> Record:
    """All requests of a case at once, one thread and one peer session each."""
    sender, case = run.sender, run.case
    sender.remote.clear()
    granted = [sender.remote.grant(room, "region")[0] for room in range(AT_ONCE)]
    for room in range(AT_ONCE):
        sender.buffer(room)
    sender.reset()
    start = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        codes = list(threads.map(lambda room: _one(run, room, granted[room]), range(AT_ONCE)))
    written = time.perf_counter() - start
    for room in range(AT_ONCE):
        sender.remote.done(room)
    total = time.perf_counter() - start
    whole = Samples()
    run.plain_of(whole, case.draft_bytes * AT_ONCE)
    return {
        "direction": case.direction, "senders": case.senders, "tokens": case.tokens,
        "page_size": case.page_size, "layout": case.layout, "heads": case.heads,
        "requests": AT_ONCE, "bytes": case.draft_bytes * AT_ONCE,
        "regions": sum(any(g.tokens for g in one.values()) for one in granted),
        "by_page": sum(any(g.by_page for g in one.values()) for one in granted),
        "codes": sorted(set(codes)), "wrong_bytes": int(sender.remote.wrong()),
        "written": written, "total": total, "ratio": total / whole.total[0],
    }  # fmt: skip


def _one(run: Run, room: int, granted: Any) -> int:
    """One request's chunk from every sender, over this room's own session."""
    case, one = run.case, run.sender
    src, dst = (page_tables(case, side)[room] for side in ("prefill", "decode"))
    chunk = Chunk(src, dst, room_pages=dst)
    writer = one.writer("auto", room)
    session = one.sessions[room]
    for number, plan in enumerate(run.plans):
        code = writer.write(session, plan, chunk, granted.get((number, 0))).code
        if code:
            return code
    return 0


# ---------------------------------------------------------------- checks, plot, main


def checks(parts: dict[str, list[Record]]) -> list[Check]:
    """The targets, over the records that they are about: what `auto` chooses."""
    found = []
    chosen = [r for r in parts["slices"] if r["method"] == r["auto"] and _large(r)]
    for name, limit, kind in (
        ("P < D in runs", 1.5, ("scatter", "contiguous")),
        ("P < D, random pages", 2.2, ("scatter", "random")),
        ("P > D in runs", 2.2, ("gather", "contiguous")),
        ("P > D, random pages", 2.2, ("gather", "random")),
    ):
        ratios = [r["ratio"] for r in chosen if _kind(r) == kind]
        if ratios:
            found.append(Check(f"{name}, to a plain write: worst", limit, worst(ratios)))
            found.append(Check(f"{name}, to a plain write: mean", limit, geomean(ratios)))
    for name, limit, ratios in (
        ("whole request to MLA alone", WHOLE_LIMIT, _to_alone(parts["whole"])),
        ("target to stock's", TARGET_LIMIT, _to_stock(parts["whole"])),
    ):
        if ratios:
            found.append(Check(f"{name}: worst", limit, worst(ratios)))
            found.append(Check(f"{name}: mean", limit, geomean(ratios)))
    if parts["at_once"]:
        failed = [r for r in parts["at_once"] if r["codes"] != [0] or r["wrong_bytes"]]
        found.append(Check(f"{AT_ONCE} chunks at once: failures", 0, len(failed)))
    speedups = _speedups(parts["slices"])
    if speedups:
        found.append(Check("over per-token, 8,192 x 256 B, pages of 16 and 64: least", 20,
                           min(speedups), at_most=False))  # fmt: skip
    return found


def _to_alone(records: list[Record]) -> list[float]:
    return [r["ratio"] for r in records if r["method"] == "with draft slices"]


def _to_stock(records: list[Record]) -> list[float]:
    return [1 / r["ratio"] for r in records if r["method"] == "MLA alone, stock's plan"]


def _large(record: Record) -> bool:
    """Whether the targets are about this size: 4K tokens and more, pages of 16 and more."""
    return bool(record["tokens"] >= 4096 and record["page_size"] >= 16)


def _kind(record: Record) -> tuple[str, str]:
    return record["direction"], record["layout"]


def _speedups(records: list[Record]) -> list[float]:
    """Per-token over what `auto` chooses at 8,192 tokens of one head, pages of 16 and 64."""
    about = [r for r in records if (r["tokens"], r["heads"]) == (8192, 1) and r["page_size"] > 1]
    found = {}
    for record in about:
        case = tuple(record[k] for k in ("direction", "senders", "page_size", "layout"))
        if record["method"] in ("direct", record["auto"]):
            found.setdefault(case, {})[record["method"]] = record["median"]
    return [max(two.values()) / min(two.values()) for two in found.values() if len(two) == 2]


def plot(result: Result, pyplot: Any) -> None:
    """Ratio to a plain write over tokens, a panel a direction, pages of 16 and one head."""
    records = result.parts["slices"]
    panels = sorted({_kind(r) for r in records})
    _, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.6), sharey=True)
    for axis, panel in zip(np.atleast_1d(axes), panels, strict=True):
        chosen = [r for r in records if _kind(r) == panel and r["page_size"] == 16
                  and r["heads"] == 1 and r["senders"] in (1, 2)]  # fmt: skip
        for method in dict.fromkeys(r["method"] for r in chosen):
            line = [r for r in chosen if r["method"] == method]
            axis.plot([r["tokens"] for r in line], [r["ratio"] for r in line], "o-", label=method)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=", ".join(panel))
        axis.legend(fontsize=7)
    np.atleast_1d(axes)[0].set_ylabel("time / one plain write")


def parse() -> argparse.Namespace:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this regex")
    parser.add_argument("--parts", default="slices,whole,at_once", help="which to run")
    parser.add_argument("--backend", choices=ENGINES, default="mooncake",
                        help="NIXL's own transports are UCX's choice: UCX_TLS")  # fmt: skip
    parser.add_argument("--busy", choices=BUSY, help="beside another thread of the sender's: one "
                        "that polls as a scheduler does, or never leaves Python")  # fmt: skip
    parser.add_argument("--merge", nargs="+", type=Path, default=[],
                        help="measure nothing: one result of these, measured in parts")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.merge:
        result = merged(arguments.merge)
    else:
        os.environ.update(MOONCAKE_ENV)
        # Its load before anything is measured.
        about = {
            **machine(),
            "backend": arguments.backend,
            "ucx_tls": os.environ.get("UCX_TLS", ""),
        }
        result = Result("transfer", arguments.quick, run_cases(arguments), machine=about)
    result.checks = checks(result.parts)
    result.finish(arguments, lambda pyplot: plot(result, pyplot))


def run_cases(arguments: argparse.Namespace) -> dict[str, list[Record]]:
    """The records of every part that was asked for."""
    count, parts = repeats(arguments), arguments.parts.split(",")
    matches = re.compile(arguments.only).search
    chosen = {
        "slices": [c for c in slice_cases(arguments.quick) if matches(str(c))],
        "whole": [c for c in whole_cases(arguments.quick) if matches(str(c))],
        "at_once": [c for c in at_once_cases(arguments.quick) if matches(str(c))],
    }
    chosen = {part: found if part in parts else [] for part, found in chosen.items()}
    every = [case for found in chosen.values() for case in found]
    if not every:
        raise SystemExit("no case matches")
    with pair(every, arguments.quick, arguments.backend) as sender:
        if chosen["whole"] and not arguments.quick:
            sender.load_stock()
        with beside(BUSY.get(arguments.busy)):
            return {part: measure(sender, part, found, count) for part, found in chosen.items()}


@contextmanager
def beside(busy: Callable[[threading.Event], None] | None) -> Iterator[None]:
    """With this in another thread, until it is told to end."""
    ended = threading.Event()
    thread = threading.Thread(target=busy, args=[ended]) if busy else None
    if thread:
        thread.start()
        time.sleep(3)
    try:
        yield
    finally:
        ended.set()
        if thread:
            thread.join()


def stay_in_python(ended: threading.Event) -> None:
    """What takes the GIL from the others as often as it may."""
    turns = 0
    while not ended.is_set():
        turns += 1


def poll(ended: threading.Event) -> None:
    """A turn of a socket that has nothing, a small operation of torch, a little Python."""
    import torch
    import zmq

    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.bind_to_random_port("tcp://127.0.0.1")
    statuses = torch.zeros(8, dtype=torch.int64)
    while not ended.is_set():
        socket.poll(0)
        statuses.fill_(1).tolist()
        _ = list(range(300))


BUSY = {"polling": poll, "python": stay_in_python}


def measure(sender: Sender, part: str, chosen: list[Case], count: int) -> list[Record]:
    """The records of all cases of one part."""
    records = []
    for case in chosen:
        print(part, case, file=sys.stderr)
        if part == "at_once":
            records.append(measure_at_once(sender, case))
        else:
            records += (measure_slices if part == "slices" else measure_whole)(sender, case, count)
    return records


if __name__ == "__main__":
    main()
