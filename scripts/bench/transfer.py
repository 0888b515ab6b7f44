"""Draft slices over Mooncake TCP: packed, direct and stock's way, against one plain write.

Two processes on loopback. The sender's process runs the product's ChunkWriter for each
sender in turn (their times add up: real senders would overlap), the receiver's runs the
product's Staging. A sample of a method is, in seconds:

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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
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
    elapsed,
    geomean,
    interleave,
    options,
    repeats,
    worst,
)
from peer import Mooncake, Remote, receiver, staging_module

from sglang_mixkv.core.plan import Copies, Plan
from sglang_mixkv.transfer.direct import MAX_DESCRIPTORS
from sglang_mixkv.transfer.rows import HostRows, RowCopy
from sglang_mixkv.transfer.writer import Chunk, ChunkWriter, Region, Written

MIB = 1 << 20
STAGING = 256 * MIB  # the receiver's buffer; the product's default
PACK = 64 * MIB  # a transfer thread's: the same, over SGLang's four transfer threads
LARGEST = STAGING  # bytes of a case; beyond it no region could be granted
MOST_RANGES = 33_000  # a method that needs more is skipped: a second a sample, and more
AT_ONCE = 8
WHOLE_LIMIT = 1.05


class TimedRows(HostRows):
    """The product's rows, with the seconds spent in copies."""

    pack = 0.0

    def copy(self, what: RowCopy) -> None:
        start = time.perf_counter()
        super().copy(what)
        self.pack += time.perf_counter() - start


@dataclass
class Sender:
    """The senders' process: one engine, the receiver at the other end."""

    remote: Remote
    engine: Mooncake
    truth: cases.Bytes

    def __post_init__(self) -> None:
        self.sessions, self.pool, self.plain = self.remote.hello()
        self.engine.batch_register([self.truth.ctypes.data], [self.truth.nbytes])
        self.rows = TimedRows()
        self.buffers: dict[int, Any] = {}

    def buffer(self, slot: int) -> Any:
        """The pack buffer of transfer thread number `slot`, made once."""
        if slot not in self.buffers:
            self.buffers[slot] = staging_module().pack_buffer(self.engine, self.rows, PACK)
        return self.buffers[slot]

    def writer(self, mode: str, slot: int = 0) -> ChunkWriter:
        return ChunkWriter(self.engine, self.rows, lambda: self.buffer(slot), mode)

    def plan(self, case: Case, sender: int) -> Plan:
        return cases.plan(case, sender, self.truth.ctypes.data, self.pool)

    def reset(self) -> None:
        self.engine.reset()
        self.rows.pack = 0.0


@contextmanager
def pair(all_cases: list[Case], quick: bool) -> Iterator[Sender]:
    """Sender and receiver with memory for the largest of these cases."""
    truth = cases.make_truth(max(map(plain_or_pools, all_cases)))
    pool = max(map(cases.dst_size, all_cases))
    plain = max(case.bytes for case in all_cases)
    staging = 32 * MIB if quick else STAGING
    with receiver(truth, pool, plain, staging, AT_ONCE) as remote:
        yield Sender(remote, Mooncake(), truth)


def plain_or_pools(case: Case) -> int:
    return max(cases.src_size(case), case.bytes)


# ---------------------------------------------------------------- methods


class Run:
    """The methods over one case. `codes`: non-zero return codes seen."""

    def __init__(self, sender: Sender, case: Case) -> None:
        self.sender, self.case = sender, case
        self.plans = [sender.plan(case, number) for number in range(case.senders)]
        self.src = page_tables(case, "prefill")[0]
        self.dst = page_tables(case, "decode")[0]
        self.codes: list[int] = []
        sender.remote.begin(case)

    def plain(self, samples: Samples) -> None:
        """One contiguous write of the same bytes."""
        one = self.sender
        addresses = [one.truth.ctypes.data], [one.plain], [self.case.bytes]
        samples.add(elapsed(lambda: self._write(*addresses)))

    def _write(self, src: list[int], dst: list[int], lengths: list[int]) -> None:
        one = self.sender
        self._note(one.engine.batch_transfer_sync(one.sessions[0], src, dst, lengths))

    def _note(self, code: int) -> None:
        if code:
            self.codes.append(code)

    def product(
        self, samples: Samples, mode: str, region: bool, plans: list[Plan] | None = None
    ) -> list[Written]:
        """The product's way: every sender's chunk, the signal, the scatter."""
        one, written = self.sender, []
        granted, grant_s = one.remote.grant(0) if region else (None, 0.0)
        one.reset()
        start = time.perf_counter()
        for number, plan in enumerate(plans or self.plans):
            written.append(self._chunk(number, plan, mode, granted))
        self._finish(samples, start, grant=grant_s)
        return written

    def _chunk(self, number: int, plan: Plan, mode: str, granted: Any) -> Written:
        one, area = self.sender, None
        if granted:
            grant = granted[number, 0]
            area = Region(grant.address, grant.tokens)
        chunk = Chunk(self.src, self.dst)
        written = one.writer(mode).write(one.sessions[0], plan, chunk, area)
        self._note(written.code)
        return written

    def _finish(self, samples: Samples, start: float, **more: float) -> None:
        one = self.sender
        sent = time.perf_counter()
        known, complete = one.remote.done(0)
        pack, wire = one.rows.pack, one.engine.wire
        samples.add(
            complete - start, plan=sent - start - pack - wire, pack=pack, wire=wire,
            signal=known - sent, scatter=complete - known,
            ranges=float(one.engine.descriptors), **more,
        )  # fmt: skip

    def stock(self, samples: Samples) -> None:
        """Slices as SGLang's send_kvcache_slice lists them, in batches that do not fail."""
        self.sender.reset()
        start = time.perf_counter()
        for plan in self.plans:
            for entry in range(len(plan.draft)):
                self._stock_entry(plan.draft.select(np.arange(len(plan.draft)) == entry))
        self._finish(samples, start)

    def _stock_entry(self, one: Copies) -> None:
        """Restates process_layer_tp_aware of sglang/srt/disaggregation/mooncake/conn.py,
        which sends the whole list in one call: that fails above some 2,048 ranges."""
        slots = np.arange(self.case.page_size).reshape(1, -1)
        src_pages, dst_pages = self.src.reshape(-1, 1), self.dst.reshape(-1, 1)
        src_item, dst_item = one.src_row * slots.size, one.dst_row * slots.size
        src = (one.src + src_pages * src_item) + (slots * one.src_row + one.src_offset)
        dst = (one.dst + dst_pages * dst_item) + (slots * one.dst_row + one.dst_offset)
        src_list, dst_list = src.reshape(-1).tolist(), dst.reshape(-1).tolist()
        lengths = [int(one.width[0])] * len(src_list)
        for first in range(0, len(src_list), MAX_DESCRIPTORS):
            part = slice(first, first + MAX_DESCRIPTORS)
            self._write(src_list[part], dst_list[part], lengths[part])

    def checked(self, method: Callable[[Samples], Any]) -> int:
        """Wrong bytes after this method on a pool of canaries."""
        self.sender.remote.clear()
        method(Samples())
        return int(self.sender.remote.wrong())


# ---------------------------------------------------------------- slices alone


def slice_methods(run: Run) -> dict[str, Callable[[Samples], Any]]:
    """The methods of a case, without those that need an absurd number of ranges.

    `packed`: what --mixkv-draft-transfer packed does. `region`: P < D through a region too.
    """
    case, found = run.case, {"plain": run.plain}
    tokens = cases.ENTRIES * case.tokens * case.senders
    gather = case.direction == "gather"
    in_pool = case.draft_bytes // case.run_bytes
    if gather or in_pool <= MOST_RANGES:
        found["packed"] = lambda samples: run.product(samples, "packed", gather)
    if not gather and case.layout == "random":
        found["region"] = lambda samples: run.product(samples, "packed", True)
    if tokens <= MOST_RANGES:
        found["direct"] = lambda samples: run.product(samples, "direct", False)
        found["stock"] = run.stock
    return found


def auto_choice(run: Run) -> str:
    """What `auto` does with this case."""
    region = bool(run.sender.remote.wants())
    if not region and 2 * run.case.draft_bytes // run.case.run_bytes > 2 * MOST_RANGES:
        return "not tried"
    written = run.product(Samples(), "auto", region)
    packed = any(one.packed_bytes for one in written)
    return "region" if region else "packed" if packed else "direct"


def measure_slices(sender: Sender, case: Case, count: int) -> list[Record]:
    """One record a method. Raises RuntimeError when bytes are wrong or a call failed."""
    run = Run(sender, case)
    methods = slice_methods(run)
    timed = {name: method for name, method in methods.items() if name != "plain"}
    choice = auto_choice(run)
    run.plain(Samples())
    wrong = {name: run.checked(method) for name, method in timed.items()}
    samples = interleave(methods, count)
    wrong |= {f"{name}, last": run.checked(method) for name, method in timed.items()}
    if any(wrong.values()) or run.codes:
        raise RuntimeError(f"{case}: wrong bytes {wrong}, return codes {run.codes}")
    return [_record(case, name, taken, samples, choice) for name, taken in samples.items()]


def _record(
    case: Case, name: str, taken: Samples, samples: dict[str, Samples], choice: str
) -> Record:
    base = float(np.median(samples["plain"].total))
    record = taken.record()
    return {
        "direction": case.direction, "senders": case.senders, "tokens": case.tokens,
        "page_size": case.page_size, "layout": case.layout, "heads": case.heads,
        "bytes": case.draft_bytes, "method": name, "auto": choice,
        **record, "ratio": record["median"] / base,
    }  # fmt: skip


def slice_cases(quick: bool) -> list[Case]:
    kinds = [("gather", 2), ("gather", 4), ("scatter", 1)]
    tokens = (64, 512) if quick else (64, 512, 4096, 8192, 32768)
    page_sizes = (16,) if quick else (1, 16, 64)
    layouts, heads = ("contiguous", "random"), (1,) if quick else (1, 2, 4, 8)
    every = product(kinds, tokens, page_sizes, layouts, heads)
    found = [Case(*kind, t, p, where, h) for kind, t, p, where, h in every]
    return [case for case in found if case.draft_bytes <= LARGEST]


# ---------------------------------------------------------------- a whole request


def whole_cases(quick: bool) -> list[Case]:
    layers, sizes = (3, (512,)) if quick else (61, (1024, 4096))
    kinds = [("gather", 2), ("scatter", 1)]
    every = product(kinds, sizes, ("contiguous", "random"))
    return [Case(*kind, tokens, 64, where, 1, layers) for kind, tokens, where in every]


def measure_whole(sender: Sender, case: Case, count: int) -> list[Record]:
    """MLA rows of all layers with the draft slices, against MLA rows alone."""
    run = Run(sender, case)
    alone = [Plan(p.page_size, p.target, Copies.empty(), p.src_pages, p.dst_pages)
             for p in run.plans[:1]]  # fmt: skip
    region = case.direction == "gather"
    methods: dict[str, Callable[[Samples], Any]] = {
        "MLA alone": lambda samples: run.product(samples, "packed", False, alone),
        "with packed slices": lambda samples: run.product(samples, "packed", region),
        "with direct slices": lambda samples: run.product(samples, "direct", False),
    }
    wrong = {name: run.checked(methods[name]) for name in list(methods)[1:]}
    samples = interleave(methods, count)
    if any(wrong.values()) or run.codes:
        raise RuntimeError(f"{case}: wrong bytes {wrong}, return codes {run.codes}")
    base = float(np.median(samples["MLA alone"].total))
    return [
        {"direction": case.direction, "senders": case.senders, "tokens": case.tokens,
         "layers": case.mla_layers, "page_size": case.page_size, "layout": case.layout,
         "method": name, **taken.record(), "ratio": float(np.median(taken.total)) / base}
        for name, taken in samples.items()
    ]  # fmt: skip


# ---------------------------------------------------------------- eight at once


def at_once_cases(quick: bool) -> list[Case]:
    tokens = 512 if quick else 32768
    kinds = product([("gather", 2), ("scatter", 1)], ("contiguous", "random"))
    return [Case(*kind, tokens, 64, where, 1, 0, AT_ONCE) for kind, where in kinds]


def measure_at_once(sender: Sender, case: Case) -> Record:
    """All requests of a case at once, one thread and one peer session each."""
    run = Run(sender, case)
    sender.remote.clear()
    region = case.direction == "gather"
    granted = [sender.remote.grant(room)[0] if region else None for room in range(AT_ONCE)]
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
    return {
        "direction": case.direction, "senders": case.senders, "tokens": case.tokens,
        "layout": case.layout, "requests": AT_ONCE, "bytes": case.draft_bytes * AT_ONCE,
        "granted": sum(one is not None for one in granted),
        "codes": sorted(set(codes)), "wrong_bytes": int(sender.remote.wrong()),
        "written": written, "total": total,
    }  # fmt: skip


def _one(run: Run, room: int, granted: Any) -> int:
    """One request's chunk from every sender, over this room's own session."""
    case, one = run.case, run.sender
    pages = (page_tables(case, side)[room] for side in ("prefill", "decode"))
    chunk = Chunk(*pages)
    writer = one.writer("packed", room)
    session = one.sessions[room]
    for number, plan in enumerate(run.plans):
        grant = granted and granted[number, 0]
        area = Region(grant.address, grant.tokens) if grant else None
        code = writer.write(session, plan, chunk, area).code
        if code:
            return code
    return 0


# ---------------------------------------------------------------- checks, plot, main


def checks(result: Result) -> list[Check]:
    """The targets, over the records that they are about."""
    found = []
    large = [r for r in result.parts["slices"] if r["method"] == "packed" and _large(r)]
    for name, limit, chosen in (
        ("P < D in runs", 1.5, [r for r in large if _kind(r) == ("scatter", "contiguous")]),
        ("P < D, random pages", 2.2, [r for r in large if _kind(r) == ("scatter", "random")]),
        (
            "P < D, random pages, through a region",
            2.2,
            [r for r in result.parts["slices"] if r["method"] == "region" and _large(r)],
        ),
        ("P > D in runs", 2.2, [r for r in large if _kind(r) == ("gather", "contiguous")]),
        ("P > D, random pages", 2.2, [r for r in large if _kind(r) == ("gather", "random")]),
    ):
        ratios = [r["ratio"] for r in chosen]
        if ratios:
            found.append(Check(f"{name}, to a plain write: worst", limit, worst(ratios)))
            found.append(Check(f"{name}, to a plain write: mean", limit, geomean(ratios)))
    whole = [r["ratio"] for r in result.parts["whole"] if r["method"] == "with packed slices"]
    if whole:
        found.append(Check("whole request to MLA alone: worst", WHOLE_LIMIT, worst(whole)))
    if result.parts["at_once"]:
        failed = [r for r in result.parts["at_once"] if r["codes"] != [0] or r["wrong_bytes"]]
        found.append(Check(f"{AT_ONCE} chunks at once: failures", 0, len(failed)))
    speedups = _speedups(result.parts["slices"])
    if speedups:
        found.append(Check("packed over per-token, 8,192 x 256 B, pages of 64: least", 20,
                           min(speedups), at_most=False))  # fmt: skip
    return found


def _large(record: Record) -> bool:
    """Whether the targets are about this size: 4K tokens and more, pages of 16 and more."""
    return bool(record["tokens"] >= 4096 and record["page_size"] >= 16)


def _kind(record: Record) -> tuple[str, str]:
    return record["direction"], record["layout"]


def _speedups(records: list[Record]) -> list[float]:
    """Direct over packed at 8,192 tokens, one head, pages of 64."""
    medians = {
        (r["direction"], r["senders"], r["layout"], r["method"]): r["median"]
        for r in records
        if (r["tokens"], r["heads"], r["page_size"]) == (8192, 1, 64)
    }
    pairs = [(medians.get((*key[:3], "direct")), value)
             for key, value in medians.items() if key[3] == "packed"]  # fmt: skip
    return [slow / fast for slow, fast in pairs if slow]


def plot(result: Result, pyplot: Any) -> None:
    """Ratio to a plain write over tokens, a panel a direction, pages of 64 (quick: any)."""
    records = result.parts["slices"]
    size = max(r["page_size"] for r in records)
    panels = sorted({_kind(r) for r in records})
    _, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 4), sharey=True)
    for axis, panel in zip(np.atleast_1d(axes), panels, strict=True):
        chosen = [r for r in records if _kind(r) == panel and r["page_size"] == size
                  and r["heads"] == 1 and r["senders"] in (1, 2)]  # fmt: skip
        for method in dict.fromkeys(r["method"] for r in chosen):
            line = [r for r in chosen if r["method"] == method]
            axis.plot([r["tokens"] for r in line], [r["ratio"] for r in line], "o-", label=method)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=", ".join(panel))
        axis.legend()
    np.atleast_1d(axes)[0].set_ylabel(f"time / one plain write (pages of {size}, 256 B slices)")


def parse() -> argparse.Namespace:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this regex")
    parser.add_argument("--parts", default="slices,whole,at_once", help="which to run")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    os.environ.update(MOONCAKE_ENV)
    result = Result("transfer", arguments.quick, {"slices": [], "whole": [], "at_once": []})
    count, parts = repeats(arguments), arguments.parts.split(",")
    matches = re.compile(arguments.only).search
    chosen = {
        "slices": [c for c in slice_cases(arguments.quick) if matches(str(c))],
        "whole": [c for c in whole_cases(arguments.quick) if matches(str(c))],
        "at_once": [c for c in at_once_cases(arguments.quick) if matches(str(c))],
    }
    chosen = {part: found for part, found in chosen.items() if part in parts and found}
    if not any(chosen.values()):
        raise SystemExit("no case matches")
    with pair([case for found in chosen.values() for case in found], arguments.quick) as sender:
        for part, found in chosen.items():
            result.parts[part] = measure(sender, part, found, count)
    result.checks = checks(result)
    result.finish(arguments, lambda pyplot: plot(result, pyplot))


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
