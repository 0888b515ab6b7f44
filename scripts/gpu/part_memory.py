"""A send while the GPU has no memory left for its pack buffer.

The GPU is filled up to --leave-mb (on the CPU: this process's address space is bounded). The pack
buffer is then refused as MemoryError, and the product's ChunkWriter sends each token's slice as a
range of its own, by the same plan. Every byte at the receiver is compared, before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices
import numpy as np
from parts import Found, Lacks, Record, Wrong

from sglang_mixkv.kv.plan import Copies, Plan, Reach
from sglang_mixkv.kv.ranges import Blocks
from sglang_mixkv.rows.host import RowCopy, Rows
from sglang_mixkv.transport.base import Limits

PAGES, PAGE = 64, 16
HEAD, HEADS, FIRST = 256, 4, 2  # P4 -> D1 of these heads: this one of a row of four
ENTRIES = 2
ROWS = PAGES * PAGE
MANY = 4096  # ranges of one copy: they are a dimension of the kernel's grid


class Local:
    """A transport to the same device: its ranges are copied, and counted."""

    limits = Limits(few=0, short=1 << 30)

    def __init__(self, rows: Rows) -> None:
        self._rows, self.ranges = rows, 0

    def register(self, address: int, size: int) -> None: ...

    def write(self, session: str, blocks: Blocks, *, overlap: bool = False) -> int:
        count, row = len(blocks.length), np.zeros(1, np.int64)
        self.ranges += count
        for start in range(0, count, MANY):
            part = slice(start, start + MANY)
            length = blocks.length[part]
            ends = blocks.src[part], blocks.dst[part]
            self._rows.copy(RowCopy(*ends, length, length, length, row, row))
        return 0

    def wait(self, handle: int) -> int:
        return handle

    def why(self, code: int) -> str:
        return str(code)

    def probe(self, session: str) -> bool:
        return True


class Link:
    """A sender's and a receiver's pool on one device, and the product's way between them."""

    def __init__(self, device: devices.Device, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._device = device
        self._sent = rng.integers(0, 256, (ENTRIES, ROWS, HEADS, HEAD), np.uint8)
        self._source = device.rows.allocate(self._sent.size)
        self._target = device.rows.allocate(ENTRIES * ROWS * HEAD)
        device.put(self._source, self._sent.ravel())
        self._pages = rng.permutation(PAGES).astype(np.int64), np.arange(PAGES)

    def _plan(self) -> Plan:
        entry = np.arange(ENTRIES)
        copies = Copies(
            src=self._source.address + entry * ROWS * HEADS * HEAD,
            dst=self._target.address + entry * ROWS * HEAD,
            src_row=entry * 0 + HEADS * HEAD,
            dst_row=entry * 0 + HEAD,
            src_offset=entry * 0 + FIRST * HEAD,
            dst_offset=entry * 0,
            width=entry * 0 + HEAD,
        )
        return Plan(PAGE, Copies.empty(), (Reach(0, copies),), PAGES, PAGES)

    def send(self, buffer_bytes: int) -> Record:
        """All pages through a writer of its own; Wrong unless every byte arrived."""
        from sglang_mixkv.prefill.worker import PackMemory
        from sglang_mixkv.prefill.writer import Chunk, ChunkWriter

        rows, transport = self._device.rows, Local(self._device.rows)
        self._device.put(self._target, np.zeros(self._target.size, np.uint8))
        memory = PackMemory(transport, rows, buffer_bytes)
        writer = ChunkWriter(transport, rows, memory.get, "packed")
        written = writer.write("peer", self._plan(), Chunk(*self._pages))
        got = self._device.get(self._target).reshape(ENTRIES, PAGES, PAGE, HEAD)
        sent = self._sent[:, :, FIRST].reshape(ENTRIES, PAGES, PAGE, HEAD)[:, self._pages[0]]
        wrong = int((got != sent).sum())
        if written.code or wrong:
            raise Wrong(f"code {written.code}, {wrong:,} wrong bytes of {sent.size:,}")
        return {"packed bytes": written.packed_bytes, "ranges": transport.ranges,
                "bytes": int(sent.size), "wrong bytes": wrong}  # fmt: skip


# ---------------------------------------------------------------- memory pressure


@contextlib.contextmanager
def filled(options: argparse.Namespace) -> Iterator[int]:
    """With --leave-mb of memory left: how much there is in fact."""
    with _full_gpu(options) if options.device == "cuda" else _bounded(options) as left:
        yield left


@contextlib.contextmanager
def _full_gpu(options: argparse.Namespace) -> Iterator[int]:
    import torch

    leave, ballast = options.leave_mb << 20, []
    torch.cuda.empty_cache()
    size = torch.cuda.mem_get_info(options.gpu)[0] - leave
    while size >= 2 << 20:
        try:
            ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            size = torch.cuda.mem_get_info(options.gpu)[0] - leave
        except torch.cuda.OutOfMemoryError:
            size //= 2
    yield torch.cuda.mem_get_info(options.gpu)[0]
    ballast.clear()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _bounded(options: argparse.Namespace) -> Iterator[int]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    leave, before = options.leave_mb << 20, resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + leave
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield leave
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refused(rows: Rows, size: int) -> str:
    """How an allocation of so much is refused. Wrong where it is had."""
    try:
        buffer: Any = rows.allocate(size)
    except MemoryError as error:
        return str(error).splitlines()[0] or "MemoryError"
    raise Wrong(f"{buffer.size >> 20} MiB were had: this GPU was not filled")


def run(options: argparse.Namespace) -> Found:
    device, size = devices.here(options), options.buffer_mb << 20
    link = Link(device, options.seed)
    try:
        before, missing = link.send(size), ""
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        before, missing = {}, error.name
    with filled(options) as left:
        text = refused(device.rows, size)
        after = {} if missing else link.send(size)
    device.rows.allocate(size)  # there is memory again
    figures = [{"memory left, MiB": left >> 20, "asked for, MiB": size >> 20, "refused": text}]
    if missing:
        says = f"the package {missing}, to send with; the allocation was refused as it should be"
        raise Lacks(says, Found(says, figures))
    figures = [{"when": when, **figures[0], **sent} for when, sent in
               (("memory left", before), ("none left", after))]  # fmt: skip
    figures[0].update({"memory left, MiB": "", "refused": ""})
    found = Found(
        f"{size >> 20} MiB refused as MemoryError with {left >> 20} MiB left; the send packed "
        f"nothing and went in {after['ranges']:,} ranges instead of {before['ranges']:,}, every "
        "byte right",
        figures, figures,
    )  # fmt: skip
    if not before["packed bytes"] or after["packed bytes"]:
        raise Wrong("expected packed bytes with memory left alone", found)
    return found
