"""Whether pack and scatter wait for what other streams do, shown by what happens if they do not.

    prefill   the drafter's stream writes rows, late; SGLang's transfer thread waits for the event
              behind it (engine/nixl.py, or SGLang's own); then the pack reads
    decode    the scatter's stream writes rows, late; CudaRows waits for it; then decode's stream
              reads

Each runs with its wait and without. With it every byte has to be the new one. Without it some must
not be: otherwise the first run would have shown nothing.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import numpy as np
import streams
import torch
from parts import Found, Record, Wrong

from sglang_mixkv.rows.cuda import CudaRows
from sglang_mixkv.rows.host import RowCopy

ROWS, HEAD, HEADS = 4096, 256, 4  # bytes of a head; heads of a row in the pool
OLD, NEW = 0x11, 0x77


class Order:
    """Both on one device: how many bytes are not the new ones."""

    def __init__(self, made: Any, device: str, number: int) -> None:
        self._streams, self._device, self._number = made, device, number

    def _memory(self, size: int, value: int) -> Any:
        return torch.full((size,), value, dtype=torch.uint8, device=self._device)

    def _settle(self) -> None:
        """Until the memory above is what it should be."""
        if self._device != "cpu":
            torch.cuda.synchronize()

    def pack(self, *, waits: bool) -> int:
        """Of a pack buffer, from a pool that the drafter's forward writes."""
        rows = CudaRows(self._number)
        pool, fresh = (self._memory(ROWS * HEADS * HEAD, value) for value in (OLD, NEW))
        packed = rows.allocate(ROWS * HEAD)
        what = _copy(pool.data_ptr() + HEAD, packed.address, HEADS * HEAD, HEAD)
        rows.copy(what)  # compiled, and its memory at hand
        self._settle()
        drafter = self._streams.stream()
        drafter.delay()
        drafter.do(lambda: pool.copy_(fresh))
        written = drafter.mark()
        if waits:
            written.synchronize()
        rows.copy(what)
        found = np.frombuffer(rows.read(packed, packed.size), np.uint8)
        drafter.synchronize()
        return int((found != NEW).sum())

    def scatter(self, *, waits: bool) -> int:
        """Of what decode reads of a pool, after a scatter into it."""
        pool, region = self._memory(ROWS * HEADS * HEAD, OLD), self._memory(ROWS * HEAD, NEW)
        seen = self._memory(ROWS * HEADS * HEAD, 0)
        what = _copy(region.data_ptr(), pool.data_ptr() + HEAD, HEAD, HEADS * HEAD)
        there = pool.view(ROWS, HEADS, HEAD)[:, 1]
        with contextlib.nullcontext() if waits else self._streams.unwaited():
            rows = CudaRows(self._number)
            rows.copy(what)
            self._settle()
            there.fill_(OLD)
            self._settle()
            with self._streams.slowly():
                rows.copy(what)
        decode = self._streams.stream()
        decode.do(lambda: seen.copy_(pool))
        decode.synchronize()
        old = int((seen.view(ROWS, HEADS, HEAD)[:, 1] != NEW).sum())
        self._settle()  # the scatter may still run
        return old


def _copy(src: int, dst: int, src_stride: int, dst_stride: int) -> RowCopy:
    """All rows of one head, in order."""
    one = np.ones(1, np.int64)
    return RowCopy(
        one * src, one * dst, one * src_stride, one * dst_stride, one * HEAD, range(ROWS),
        range(ROWS),
    )  # fmt: skip


def run(options: argparse.Namespace) -> Found:
    figures: list[Record] = []
    if options.device == "cuda":
        torch.cuda.set_device(options.gpu)
    with streams.here(options.device, options.delay_ms) as made:
        order = Order(made, options.device, options.gpu)
        for name, once in (("pack", order.pack), ("scatter", order.scatter)):
            old = {waits: once(waits=waits) for waits in (True, False)}
            figures.append(
                {"what": name, "bytes": ROWS * HEAD, "old bytes": old[True],
                 "old bytes without the wait": old[False]}
            )  # fmt: skip
    where = "" if options.device == "cuda" else "in a model of streams, "
    says = f"{where}no old byte with the waits; without them " + ", ".join(
        f"{f['old bytes without the wait']:,} of {f['bytes']:,} in a {f['what']}" for f in figures
    )
    found = Found(says, figures, figures)
    for figure in figures:
        if figure["old bytes"]:
            raise Wrong(f"a {figure['what']} moved {figure['old bytes']:,} old bytes", found)
        if not figure["old bytes without the wait"]:
            text = f"a {figure['what']} without its wait moved no old byte: nothing was shown"
            raise Wrong(f"{text} (a longer --delay-ms may help)", found)
    return found
