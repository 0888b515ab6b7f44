"""Pack, unpack and checksum of the product, as shares of a copy on the device of the same bytes.

share     of the copies alone, of a whole request in one slot: the product's code without its
          uploads and its waits, the Triton kernel, and the device's copy, in turns
by slots  the product's whole calls, a segment after the other in slots of 4 MiB, beside a copy of
          each slot that is waited for

Every byte is compared, of torch's copies and of the kernel's. Judged are requests that are larger
than a GPU's caches. Without a GPU the same runs in small, with the kernel in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import itertools
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

from sglang_mixkv.draft import rows as product
from sglang_mixkv.draft.rows import HEADER, DraftRows, Staging

TOKENS = {"cuda": (1 << 10, 8 << 10, 32 << 10, 128 << 10), "cpu": (40,)}
JUDGED = 128 << 20  # bytes: twice what the largest L2 caches hold
LEAST = 0.8
BURST, BURST_BYTES = 20, 4 << 30  # calls of one sample, at most so many and of so many bytes
BUSY_CYCLES = 200_000  # some 0.1 ms, in which the host starts a graph
STAMP = 7
KINDS = ("pack", "unpack")
CALLS = (*KINDS, "checksum", "copy")
Copies = dict[str, Callable[[], Any]]


class Prepared(DraftRows):
    """Rows of one request: their numbers are uploaded once, since a graph cannot hold that."""

    _ready: list[Any] | None = None

    def _parts(self, *what: Any) -> Iterator[tuple[Any, Any, Any]]:
        if self._ready is None:
            self._ready = list(super()._parts(*what))
        return iter(self._ready)


def on_the_current_stream() -> Any:
    """In it the product's copies wait for nothing."""
    return mock.patch.object(product, "own_stream", return_value=nullcontext())


class Case:
    """Some heads of a request: its pool, one slot for all of it, and slots as the product has."""

    def __init__(
        self, drafter: scene.Drafter, dtype: str, heads: int, layout: str, tokens: int, device: Any
    ) -> None:
        self.name = f"{drafter.name}, {dtype}, {heads} of {drafter.heads} heads, {layout}"
        self.held, self.tokens, self.device = range(drafter.heads), tokens, device
        self.heads = range(drafter.heads - heads, drafter.heads)
        page = scene.LAYOUTS[layout]
        whole = -(-tokens // (page or 1)) * (page or 1)
        self.pool = scene.pool(drafter.layers, drafter.heads, whole, dtype, device, tokens)
        self.rows = scene.rows_of(tokens, page, tokens)
        self.draft = DraftRows(self.pool, self.held, by_numpy=False)
        self.size = tokens * self.draft.bytes_per_token(heads)
        packed = -(-self.draft.packed_bytes(tokens, heads) // 64) * 64
        self.slot = Staging(1, packed, device).slot(0)
        self.payload = self.slot[HEADER : HEADER + self.size]
        self.target = torch.empty_like(self.payload)
        slot = scene.SLOT[device.type]
        self.step = (slot - self.draft.packed_bytes(0, 0)) // self.draft.bytes_per_token(heads)
        self.segments = -(-tokens // self.step)
        self.slots = Staging(min(scene.SLOTS, self.segments), slot, device)

    def by_slots(self, act: Callable[[Any, torch.Tensor], Any]) -> None:
        for number, first in enumerate(range(0, self.tokens, self.step)):
            rows = self.rows[first : first + self.step]
            act(rows, self.slots.slot(number % self.slots.count))

    # -- whether the bytes are right

    def wrong(self) -> int:
        """Bytes of the slot that are not those of the pool."""
        places, end, found = torch.from_numpy(self.rows).to(self.device), 0, 0
        for entry in scene.as_bytes(self.pool):
            wanted = entry[places][:, self.heads.start :].flatten()
            start, end = end, end + wanted.numel()
            found += int((self.payload[start:end] != wanted).sum())
        return found

    def check(self, by: str, copies: Copies) -> None:
        """Raises Wrong unless these pack what the pool has, and unpack it to where it was."""
        self.payload.zero_()
        copies[f"pack, {by}"]()
        wrong = {"pack": self.wrong()}
        for entry in scene.as_bytes(self.pool):
            entry.zero_()
        copies[f"unpack, {by}"]()
        others = [entry[:, : self.heads.start] for entry in scene.as_bytes(self.pool)]
        wrong["unpack"] = self.wrong() + sum(int(other.count_nonzero()) for other in others)
        if any(wrong.values()) or not self.payload.any():
            raise Wrong(f"{self.name}, {self.tokens:,} tokens, {by}: wrong bytes: {wrong}")

    # -- the copies

    def alone(self) -> Copies:
        """What only starts copies on the current stream."""
        prepared = Prepared(self.pool, self.held, by_numpy=False)
        given = self.rows, self.heads, self.slot
        return {
            "copy": lambda: self.target.copy_(self.payload),
            "pack, torch": lambda: prepared.pack(*given, STAMP),
            "unpack, torch": lambda: prepared.unpack(*given),
        }

    def kernel(self) -> Copies:
        import triton_rows

        widths = np.array(self.draft.head_bytes) * len(self.heads)
        ends = np.cumsum(widths * self.tokens)
        packed = self.payload.data_ptr() + ends - widths * self.tokens
        first = np.array(self.draft.head_bytes) * self.heads.start
        pool = np.array([entry.data_ptr() for entry in self.pool]) + first
        row = np.array(self.draft.head_bytes) * len(self.held)
        order = np.arange(self.tokens)
        pack = triton_rows.RowCopy(pool, packed, row, widths, widths, self.rows, order)
        unpack = triton_rows.RowCopy(packed, pool, widths, row, widths, order, self.rows)
        return {
            "pack, Triton": triton_rows.prepared(pack, self.device),
            "unpack, Triton": triton_rows.prepared(unpack, self.device),
        }

    def calls(self) -> Copies:
        """The product's own, and copies of as many bytes; each waits for its end."""
        draft, heads = self.draft, self.heads
        segment = min(self.tokens, self.step)

        def copy(rows: Any, slot: torch.Tensor) -> None:
            size = len(rows) * draft.bytes_per_token(len(heads))
            with product.own_stream(self.device):
                self.target[:size].copy_(slot[HEADER : HEADER + size])

        return {
            "copy": lambda: self.by_slots(copy),
            "pack": lambda: self.by_slots(lambda r, s: draft.pack(r, heads, s, STAMP)),
            "unpack": lambda: self.by_slots(lambda r, s: draft.unpack(r, heads, s)),
            "checksum": lambda: draft.checksum(self.slots.slot(0), segment, len(heads)),
        }


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
    with on_the_current_stream():
        copies = case.alone()
        case.check("torch", copies)
        try:
            case.check("Triton", kernel := case.kernel())
            copies |= kernel
        except Wrong:
            raise
        except Exception as error:  # no Triton, or no compiler for it
            record["no kernel"] = repr(error)[:200]
        copies["copy"]()
        samplers = {name: sampler(copy, case.size, case.device) for name, copy in copies.items()}
        taken = timed(samplers, count)
    record["copy GB/s"] = case.size / float(np.median(taken["copy"].total)) / 1e9
    record |= {f"{n} share": 1 / ratio(taken[n], taken["copy"]) for n in copies if n != "copy"}
    calls = case.calls()
    for call in calls.values():
        call()
    taken = timed({name: partial(elapsed, call) for name, call in calls.items()}, min(count, 3))
    for name, found in taken.items():
        segments = 1 if name == "checksum" else case.segments
        record[f"{name} us a slot"] = float(np.median(found.total)) / segments * 1e6
    return record


def cases(device: torch.device) -> Iterator[Case]:
    """All heads, as between equal sizes, and one, the narrowest row that a reader can want."""
    shapes: Any = itertools.product(scene.DRAFTERS, scene.DTYPES, scene.LAYOUTS)
    if device.type == "cpu":  # Triton's interpreter is slow
        shapes = zip(scene.DRAFTERS, itertools.cycle(scene.DTYPES), scene.LAYOUTS, strict=False)
    for count, (drafter, dtype, layout) in itertools.product(TOKENS[device.type], shapes):
        for heads in (drafter.heads, 1):
            if fits(drafter, count, device):
                yield Case(drafter, dtype, heads, layout, count, device)


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
    if share < LEAST:
        return f"torch below {LEAST:.0%} of a device copy: the kernel is needed ({where})"
    return f"torch at {LEAST:.0%} of a device copy or more: the kernel is not needed ({where})"


def run(options: argparse.Namespace) -> Found:
    device, records = scene.device_of(options), list[Record]()
    for case in cases(device):
        try:
            records.append(measure(case, options.repeats))
        except Wrong as why:
            raise Wrong(str(why), Found("", records)) from None
    if device.type == "cpu":
        message = f"every byte right in {len(records)} cases"
    else:
        most = {name: max(r[f"{name} us a slot"] for r in records) for name in CALLS}
        calls = ", ".join(f"{name} {us:.0f}" for name, us in most.items())
        message = f"{verdict(records)}; us a slot at most: {calls}"
    return Found(message, records)
