"""A rank's draft KV rows on a GPU: batches of slots packed, unpacked and verified by kernels.

A batch may mix requests, readers and ranges of heads. It takes one upload (its jobs, 64 bytes each,
and their page numbers), one or two launches (kernels.py) and one event.

Unpacking stores first and compares afterwards, so a slot is read only once, and the sum covers the
stored bytes. Nothing reads the rows in between, since the request has not started. After a failed
batch, rows may be unchecked: its requests go cold, which zeroes them. Comparing before storing
would not be safer: until then the rows hold another request's KV.

The constructor compiles, loads and runs each kernel once, and no batch causes another compilation.
Triton's own launcher, which needs a C compiler, is not used.

Kernels on this stream see all work that the device had completed when the host started them. So:

    pack        SGLang's events after the chunk's forward must be done.
    unpack      The reads into the slots must have ended, and the event after an earlier forward
                that may still write these rows must be done. If the GPU does not itself order a
                NIC's writes, they are flushed first (Driver.needs_flush).
    clear       The event after an earlier forward must be done, as for unpack.
    afterwards  Once `BatchTicket.over` is true, forwards that use the rows may be launched on any
                stream, slots may be read or filled again, and pages may be freed.

Starting a batch takes six driver calls, and polling it takes one; none releases the GIL. Only
`pages`, called once per request or chunk, uses numpy.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_mixkv.draft.cuda import CudaError, Driver, Event, UnsafeError
from sglang_mixkv.draft.kernels import COLUMN, TOKENS, UNIT, WARPS, compiled
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

MAX_BATCH = 64  # slots of a batch
IN_FLIGHT = 2  # batches
SETTLERS = 8  # programs that clear the rows of a wrong slot, per entry
OLDEST = 80  # the lowest compute capability that tests cover
JOB = struct.Struct("<6qQq")  # a line of jobs, as kernels.py reads it
CHECKS = tuple(SlotCheck)
KERNELS = {"pack": ("pack", "seal"), "unpack": ("unpack", "settle"), "clear": ("clear",)}
UNKNOWN = memoryview(struct.pack("<q", SlotCheck.ERROR) * MAX_BATCH).cast("q")


class GpuJob(NamedTuple):
    """A segment validated by `GpuRows.job`: `tokens` tokens from token `first` of `pages` on,
    `width` heads from the rank's head `head` on, and the slot's address in units."""

    address: int
    pages: memoryview
    first: int
    tokens: int
    head: int
    width: int
    stamp: int


class BatchTicket(Event):
    """A started batch. The thread that started it polls `done`; a closing gate polls `over`."""

    def __init__(self, driver: Driver, buffers: _BatchBuffers, count: int, free: list[Any]) -> None:
        self._buffers, self._count, self._free = buffers, count, free
        self.results: list[SlotCheck] = []  # what each job found, once the batch is done
        super().__init__(driver)

    def done(self) -> bool:
        """Return whether the batch has ended, without blocking."""
        if not self.results and self.over():
            found = UNKNOWN if self.error else self._buffers.results
            self.results = [CHECKS[one] for one in found[: self._count]]
            self._free.append(self._buffers)
        return bool(self.results)


class _BatchBuffers:
    """Host and device memory for a batch in flight: its results, which kernels write to the host,
    its jobs and its page numbers. `entries`: the address of the array of kernels.py."""

    def __init__(self, driver: Driver, entries: int, page_numbers: int) -> None:
        size = MAX_BATCH * (8 + JOB.size) + 4 * page_numbers
        device, host, memory = driver.allocate(size)
        self.device, self.source = device + MAX_BATCH * 8, host + MAX_BATCH * 8
        self.results, self._host = memory[: MAX_BATCH * 8].cast("q"), memory[MAX_BATCH * 8 :]
        # Triton adds parameters for scratch memory, which these kernels do not use.
        self._values = [ctypes.c_uint64(n) for n in (self.device, entries, host, 0, 0, 0, 0)]
        pointers = [ctypes.addressof(value) for value in self._values]
        self.parameters = (ctypes.c_void_p * len(pointers))(*pointers)

    def write(self, jobs: Sequence[GpuJob]) -> int:
        """Write the jobs, then their page numbers. Return the number of bytes to upload."""
        end = len(jobs) * JOB.size
        for number, (address, pages, *numbers) in enumerate(jobs):
            line = address, self.device + end, *numbers, 0
            JOB.pack_into(self._host, number * JOB.size, *line)
            start, end = end, end + len(pages)
            self._host[start:end] = pages
        self.results[:] = UNKNOWN  # results that no kernel writes are errors
        return end


class GpuRows:
    """One rank's draft pool, in pages of `page_size` tokens, and its `staging`, for one thread. The
    constructor blocks. `job` raises ValueError for a bad job before it joins a batch, so no other
    job fails. `start` raises CudaError if a batch could not be started; then none of it runs."""

    def __init__(self, rows: DraftRows, page_size: int, staging: Any, driver: Driver) -> None:
        widths = sorted(set(rows.head_bytes))
        if any(n % UNIT for n in [*widths, *(entry.data_ptr() for entry in rows.entries)]):
            reason = f"heads of {widths} bytes: not all begin at a multiple of {UNIT} bytes"
            raise ValueError(reason)
        self.driver, self._heads, self._page, self._staging = driver, rows.heads, page_size, staging
        self._rows = rows  # keeps the memory allocated: kernels only have its addresses
        self._num_pages = rows.num_rows // page_size
        units = [size // UNIT for size in rows.head_bytes]
        self._entries, self._widest, self._in_all = len(units), max(units), sum(units)
        lines = b""
        for number, (entry, unit) in enumerate(zip(rows.entries, units, strict=True)):
            address, before = entry.data_ptr() // UNIT, sum(units[:number])
            lines += struct.pack("<4q", address, unit * len(rows.heads), unit, before)
        table, source, memory = driver.allocate(len(lines))
        memory[:] = lines
        driver.upload(table, source, len(lines))
        in_slot = staging.slot_bytes // (self._in_all * UNIT) // page_size + 2  # of one head's rows
        numbers = self._num_pages + MAX_BATCH * in_slot
        self._free = [_BatchBuffers(driver, table, numbers) for _ in range(IN_FLIGHT)]
        self._flushes = driver.needs_flush()
        kernels = compiled(driver.capability, page_size)
        self._kernels = {name: self._load(kernel) for name, kernel in kernels.items()}
        self._warm_up()

    def _load(self, kernel: Any) -> tuple[int, int]:
        """Return a kernel's function and the bytes of shared memory that it needs."""
        about = kernel.metadata
        if any(getattr(about, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
            raise CudaError(f"{about.name} needs scratch memory")
        return self.driver.load(kernel.asm["cubin"], about.name), about.shared

    def _warm_up(self) -> None:
        """Run each kernel, since CUDA may load it only at its first launch. This changes no row."""
        pages, heads = self.pages([0]), self._heads[:1]
        for what, job, expected in (
            ("pack", self.job(pages, 0, 1, heads, stamp=1), SlotCheck.OK),
            ("unpack", self.job(pages, 0, 1, heads, stamp=1), SlotCheck.OK),
            ("unpack", self.job(pages, 0, 0, heads, stamp=2), SlotCheck.STALE),
            ("clear", self.job(pages, 0, 0), SlotCheck.OK),
        ):
            ticket = self.start(what, [job])
            while not ticket.done():
                time.sleep(1e-4)
            if ticket.error:
                raise CudaError(ticket.error)
            if ticket.results != [expected]:
                raise UnsafeError(f"a kernel is wrong: expected {expected!r}, got {ticket.results}")

    max_batch = MAX_BATCH

    def job(
        self, pages: memoryview, first: int, tokens: int, heads: range | None = None, slot: int = 0,
        stamp: int = 0,
    ) -> GpuJob:  # fmt: skip
        """Make a job. `pages`: from the method `pages`. `heads`: global numbers. To clear all
        heads, pass neither heads nor a slot. Raises ValueError if anything is out of range."""
        own, staging, page = self._heads, self._staging, self._page
        wanted = own if heads is None else heads
        head, width = wanted.start - own.start, len(wanted)
        if wanted.step != 1 or not 0 <= head < head + width <= len(own):
            raise ValueError(f"{heads}: expected some of {own}")
        held = len(pages) // 4 * page
        if min(first, tokens) < 0 or first + tokens > held:
            raise ValueError(f"{tokens} rows from {first} on: the pages have {held}")
        size = HEADER + tokens * width * self._in_all * UNIT
        if not 0 <= slot < staging.count or (heads is not None and size > staging.slot_bytes):
            raise ValueError(f"{tokens} tokens of {width} heads do not fit slot {slot}")
        address = (staging.address + slot * staging.slot_bytes) // UNIT
        used = pages[4 * (first // page) : 4 * -(-(first + tokens) // page)]
        return GpuJob(address, used, first % page, tokens, head, width, stamp)

    @property
    def can_start(self) -> bool:
        return bool(self._free)

    def pages(self, numbers: Any) -> memoryview:
        """Return page numbers of the draft pool in the form for jobs."""
        found = np.asarray(numbers)
        if len(found) and not 0 <= found.min() <= found.max() < self._num_pages:
            raise ValueError(f"pages up to {found.max()}: the pool has {self._num_pages}")
        return memoryview(found.astype(np.int32).tobytes())

    def start(self, what: str, jobs: Sequence[GpuJob]) -> BatchTicket:
        """Start a batch that fills slots ("pack"), copies segments to their rows ("unpack"; zeros
        if a slot's stamp or sum is wrong), or zeroes all heads of rows ("clear"). A batch must not
        fill a slot or write a row twice."""
        if not self._free or not 0 < len(jobs) <= MAX_BATCH:
            raise ValueError(f"{len(jobs)} jobs, and {len(self._free)} of {IN_FLIGHT} batches free")
        buffers, driver = self._free.pop(), self.driver
        try:
            size, grids = buffers.write(jobs), self._grids(jobs)
            driver.bind()
            if self._flushes and what == "unpack":
                driver.flush()
            driver.upload(buffers.device, buffers.source, size)
            for name in KERNELS[what]:
                function, shared = self._kernels[name]
                driver.launch(function, grids[name], 32 * WARPS, shared, buffers.parameters)
            return BatchTicket(driver, buffers, len(jobs), self._free)
        except Exception:
            driver.drain()
            self._free.append(buffers)
            raise

    def _grids(self, jobs: Sequence[GpuJob]) -> dict[str, tuple[int, int, int]]:
        """Return each kernel's grid, sized for the largest job. Programs that a smaller job or a
        correct slot does not need return immediately."""
        tiles = 1
        for job in jobs:
            columns = -(-2 * job.width * self._widest // COLUMN)
            tiles = max(tiles, -(-job.tokens // TOKENS) * columns)
        move, seal = (tiles, self._entries, len(jobs)), (1, 1, len(jobs))
        settle = (min(tiles, SETTLERS), *move[1:])
        return {"pack": move, "seal": seal, "unpack": move, "settle": settle, "clear": move}


def gpu_rows(rows: DraftRows, page_size: int, staging: Any, asked: str = "auto") -> GpuRows | str:
    """Return the kernels for this pool, or why torch copies. Raises UnsafeError if both may err."""
    device = rows.device
    if device.type != "cuda" or torch.version.hip:
        return f"the pool is on {device}, which is not a CUDA device"
    try:
        driver = Driver(device.index)
        rows.flush = driver.flush if driver.needs_flush() else None
        if asked == "torch":
            return "SGLANG_MIXKV_GPU_COPIES is torch"
        if driver.capability < OLDEST:
            return f"compute capability {driver.capability / 10}: expected {OLDEST / 10} or later"
        return GpuRows(rows, page_size, staging, driver)
    except UnsafeError:
        raise
    except Exception as error:  # no libcuda, no ptxas, no place for compiled kernels, ...
        return repr(error)[:300]
