"""Pack, unpack and verify of the product, as shares of a copy on the device of the same bytes.

share     of the copies alone, of a whole request in one slot: the product's code without its
          uploads and its waits, the Triton kernel, and the device's copy, in turns
by slots  the product's whole calls, a segment after the other in slots of 4 MiB, beside a copy of
          each slot that is waited for

Every byte is compared, of torch's copies and of the kernel's, and of rows that are cleared; a
slot's sum has to be the host's. Judged are requests that are larger than a GPU's caches: they come
first, and what the part's time does not suffice for is left out. Without a GPU the same runs in
small, with the kernel in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import scene
import torch
from common import Samples, elapsed, interleave, ratio
from parts import Found, Record, Wrong
from row_case import Case

from sglang_mixkv.draft import rows as product

TOKENS = {"cuda": (128 << 10, 32 << 10, 8 << 10, 1 << 10), "cpu": (40,)}
JUDGED = 128 << 20  # bytes: twice what the largest L2 caches hold
LEAST = 0.8
IN_TIME = 0.8  # of the part's limit: no case begins later
BURST, BURST_BYTES = 20, 4 << 30  # calls of one sample, at most so many and of so many bytes
BUSY_CYCLES = 200_000  # some 0.1 ms, in which the host starts a graph
KINDS = ("pack", "unpack")
CALLS = (*KINDS, "verify", "copy")


def on_the_current_stream() -> Any:
    """In it the product's copies wait for nothing."""
    return mock.patch.object(product, "own_stream", return_value=nullcontext())


def sampler(work: Callable[[], Any], size: int, device: torch.device) -> Callable[[], float]:
    """Each call takes a sample: seconds of `work`, which starts copies of so many bytes on the
    current stream, on the device. It has run before: a graph cannot hold what it compiles."""
    if device.type == "cpu":
        return partial(elapsed, work)
    count = max(2, min(BURST, BURST_BYTES // size))

    def all_of_them() -> None:
        for _ in range(count):
            work()

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()

    def sample() -> float:
        """Some large copies take twice as long in a graph (pytorch/pytorch#191284), and small ones
        wait for the host outside of one."""
        torch.cuda._sleep(BUSY_CYCLES)
        return min(between_events(graph.replay), between_events(all_of_them)) / count

    return sample


def between_events(start_work: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    start_work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def timed(samplers: dict[str, Callable[[], float]], count: int) -> dict[str, Samples]:
    return interleave(
        {name: lambda samples, take=take: samples.add(take()) for name, take in samplers.items()},
        count,
    )


def measure(case: Case, count: int) -> Record:
    """Raises Wrong where bytes are."""
    record: Record = {"case": case.name, "tokens": case.tokens, "bytes": case.size}
    with on_the_current_stream():  # behind what fills the pool and the slot
        case.check("torch", case.whole(case.draft))
        copies = case.alone()
        try:
            case.check("Triton", kernel := case.kernel())
            copies |= kernel
        except Wrong:
            raise
        except Exception as error:  # no Triton, or no compiler for it
            record["no kernel"] = repr(error)[:200]
        for copy in copies.values():
            copy()
        samplers = {name: sampler(copy, case.size, case.device) for name, copy in copies.items()}
        taken = timed(samplers, count)
    record["copy GB/s"] = case.size / float(np.median(taken["copy"].total)) / 1e9
    record |= {f"{n} share": 1 / ratio(taken[n], taken["copy"]) for n in copies if n != "copy"}
    calls = case.calls()
    for call in calls.values():
        call()
    taken = timed({name: partial(elapsed, call) for name, call in calls.items()}, min(count, 3))
    for name, found in taken.items():
        segments = 1 if name == "verify" else case.segments
        record[f"{name} us a slot"] = float(np.median(found.total)) / segments * 1e6
    with on_the_current_stream():
        case.check_sum()
        case.check_clear()
    return record


def cases(device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Arguments of a Case each: all heads, as between equal sizes, and one, the narrowest row that
    a reader can want."""
    shapes: Any = itertools.product(scene.DRAFTERS, scene.DTYPES, scene.LAYOUTS)
    if device.type == "cpu":  # Triton's interpreter is slow
        shapes = zip(scene.DRAFTERS, itertools.cycle(scene.DTYPES), scene.LAYOUTS, strict=False)
    for count, (drafter, dtype, layout) in itertools.product(TOKENS[device.type], shapes):
        for heads in (drafter.heads, 1):
            yield drafter, dtype, heads, layout, count, device


def fits(drafter: scene.Drafter, tokens: int, device: torch.device) -> bool:
    """Whether a pool, a slot and a copy of it, and what comparing takes are in the free memory."""
    if device.type == "cpu":
        return True
    torch.cuda.empty_cache()
    pool = 2 * drafter.layers * drafter.heads * scene.HEAD * 2 * tokens
    return 5 * pool < torch.cuda.mem_get_info(device)[0]


def verdict(records: list[Record]) -> str:
    """Whether the product needs the kernel, by the worst of the requests that count."""
    judged = [r for r in records if r["bytes"] >= JUDGED]
    if not judged:
        return "no request is large enough to judge"
    shares = [(r[f"{kind}, torch share"], kind, r) for kind in KINDS for r in judged]
    share, kind, record = min(shares, key=lambda one: one[0])
    kernel = record.get(f"{kind}, Triton share")
    beside = "not measured" if kernel is None else f"{kernel:.0%}"
    where = f"{share:.0%} in {kind} of {record['case']}, the kernel {beside} there"
    if share >= LEAST:
        return f"torch at {LEAST:.0%} of a device copy or more: the kernel is not needed ({where})"
    choice = "needed" if kernel is not None and kernel > share else "no help"
    return f"torch below {LEAST:.0%} of a device copy: the kernel is {choice} ({where})"


def run(options: argparse.Namespace) -> Found:
    device, records, left = scene.device_of(options), list[Record](), 0
    until = time.monotonic() + IN_TIME * options.part_limit_s
    for drafter, *rest in cases(device):
        if (records and time.monotonic() > until) or not fits(drafter, rest[-2], device):
            left += 1
            continue
        try:
            records.append(measure(Case(drafter, *rest), options.repeats))
        except Wrong as why:
            raise Wrong(str(why), Found("", records)) from None
    if device.type == "cpu":
        message = f"every byte right in {len(records)} cases"
    else:
        most = {name: max(r[f"{name} us a slot"] for r in records) for name in CALLS}
        calls = ", ".join(f"{name} {us:.0f}" for name, us in most.items())
        message = f"{verdict(records)}; us a slot at most: {calls}"
    message += f"; {left} cases left out for want of time or memory" if left else ""
    return Found(message, records)
