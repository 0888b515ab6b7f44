"""The drafter's KV rows on a GPU: batches of slots packed, verified and unpacked by kernels.

A batch may mix rooms, readers and ranges of heads. It is one upload of its jobs, 64 bytes each, one
or two launches (kernels.py) and one event:

    pack      _move gathers rows into slots and adds up their words in registers; _seal writes the
              headers
    unpack    _verify adds up the words of each slot; _move compares stamp and sum, and scatters the
              rows of those slots of which both are right
    clear     _move writes zeros

So a wrong slot writes nothing, which is a property of two kernels alone. One pass that scatters
while it adds up would not read slots twice, the second time mostly from the L2 cache. But wrong
rows would be in the pool until the room is cleared, and that they never reach SGLang would have to
be proven of the state machine, in each of its orders.

All kernels are compiled, loaded and run once by the constructor. Nothing in a batch can make it
compile later: cuda.py launches the loaded functions, with grids that depend on the batch and
arguments that do not. Triton's own launcher, which needs a C compiler, is not used.

Order. Kernels of this stream see what was done on the device when the host started them:

    start_pack    SGLang's events behind the chunk's forward must be done.
    start_unpack  The reads into the slots must have ended, and the event behind an earlier forward
                  that may still write these rows must be done. Where the GPU does not order a NIC's
                  writes itself, they are flushed first (Driver.needs_flush).
    start_clear   As start_unpack.
    afterwards    Once `Ticket.done` is true or `Ticket.wait` has returned, forwards that use the
                  rows may be launched on any stream, slots may be read or filled again, and pages
                  may be given back.

A caller that could not wait for an event before it starts a batch would have to make this stream
wait for it (cuStreamWaitEvent).

Cost. To start a batch takes six calls of the driver (bind, upload, two launches, a new event and
its record), none of torch or numpy, and never gives up the GIL; each look at it takes one call
more. To upload page numbers takes two, and gives up the GIL where they are more than 500. Memory:
1 MiB pinned and 1 MiB of the device for each 262,144 page numbers in use at once, and some 20 KiB.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_mixkv.draft.cuda import CudaError, Driver, Event
from sglang_mixkv.draft.kernels import BLOCK, COLUMN, TOKENS, UNIT, WARPS, compiled
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

MOST = 64  # slots of a batch
IN_FLIGHT = 2  # batches
PAGES = 1 << 18  # page numbers for which memory is allocated at once
OLDEST = 80  # the compute capability of the oldest GPU that the kernels are compiled for in tests
JOB = struct.Struct("<6qQq")  # a line of jobs, as kernels.py reads it
CHECKS = tuple(SlotCheck)
UNKNOWN = memoryview(struct.pack("<q", SlotCheck.ERROR) * MOST).cast("q")


class Pages:
    """Page numbers of a chunk or a room on the device, for as long as somebody holds this object.
    `tokens`: how many the pages have."""

    def __init__(self, tokens: int, place: tuple[int, int, memoryview], free: list[Any]) -> None:
        self.tokens, self.address = tokens, place[0]
        self._place, self._free = place, free

    def __del__(self) -> None:
        self._free.append(self._place)  # by any thread


class Job(NamedTuple):
    """A segment that `GpuRows.job` has checked: `tokens` tokens, from token `first` of `pages` on,
    of `width` heads from the rank's head `head` on, in the slot at this address in units."""

    address: int
    pages: Pages
    first: int
    tokens: int
    head: int
    width: int
    stamp: int


class Ticket:
    """A batch that was started. The thread that started it has to ask until it is done."""

    def __init__(self, event: Event, place: _Place, jobs: Sequence[Job], free: list[Any]) -> None:
        self._event, self._place, self._jobs, self._free = event, place, jobs, free
        self._results: list[SlotCheck] = []
        self.error = ""

    def done(self) -> bool:
        """Whether the batch has ended; it does not block."""
        if self._results:
            return True
        try:
            if not self._event.is_done():
                return False
            self._results = self._place.results(len(self._jobs))
        except CudaError as error:
            self.error, self._results = str(error), [SlotCheck.ERROR] * len(self._jobs)
        self._free.append(self._place)
        self._jobs = ()  # and their pages
        return True

    def results(self) -> list[SlotCheck]:
        """What each job found, once the batch is done."""
        if not self._results:
            raise RuntimeError("a batch that is not done has no results")
        return self._results

    def over(self) -> bool:
        """Whether the batch has ended, asked by any thread: for a gate that closes. After an error
        of the device nothing runs there any more."""
        try:
            return self._event.is_done()
        except CudaError:
            return True

    def wait(self) -> None:
        """Block until the batch has ended, in any thread: for a gate that closes."""
        try:
            self._event.wait()
        except CudaError as error:
            self.error = str(error)


class _Place:
    """Memory of a batch in flight: its jobs on the host and on the device, and its results on the
    host, which kernels write. `entries`: see kernels.py."""

    def __init__(self, driver: Driver, entries: int) -> None:
        self.jobs = driver.allocate(MOST * JOB.size)
        self.source, self.host = driver.allocate_host(MOST * JOB.size)
        address, results = driver.allocate_host(MOST * 8)
        self._results = results.cast("q")
        # Triton adds parameters for scratch memory, which these kernels do not use.
        self._values = [ctypes.c_uint64(n) for n in (self.jobs, entries, address, 0, 0, 0, 0)]
        pointers = [ctypes.addressof(value) for value in self._values]
        self.parameters = (ctypes.c_void_p * len(pointers))(*pointers)

    def forget(self) -> None:
        """A result that no kernel writes is an error."""
        self._results[:] = UNKNOWN

    def results(self, count: int) -> list[SlotCheck]:
        return [CHECKS[found] for found in self._results[:count]]


class GpuRows:
    """The draft pool of one rank, `entries` and `heads` as DraftRows has them, in pages of
    `page_size` tokens; and its `staging`. One thread uses it. The constructor blocks.

    ValueError where a job lies outside, which is found before it is in a batch: one bad job fails
    no other. CudaError where a batch could not be started; nothing of it runs any more then.
    """

    def __init__(
        self, entries: Sequence[Tensor], heads: range, page_size: int, staging: Any, driver: Driver
    ) -> None:
        pools = [entry.view(torch.uint8) for entry in entries]
        if reason := unfit(pools, heads, staging):
            raise ValueError(reason)
        self.driver, self._heads, self._page, self._staging = driver, heads, page_size, staging
        self._pools = pools  # kept: kernels know their addresses alone
        self._num_pages = min(pool.shape[:-2].numel() for pool in pools) // page_size
        units = [pool.shape[-1] // UNIT for pool in pools]
        self._entries, self._widest, self._in_all = len(pools), max(units), sum(units)
        lines = struct.pack("<4q", 0, 0, 0, self._in_all)
        for number, pool in enumerate(pools):
            address, unit, before = pool.data_ptr() // UNIT, units[number], sum(units[:number])
            lines += struct.pack("<4q", address, unit * len(heads), unit, before)
        table, (source, host) = driver.allocate(len(lines)), driver.allocate_host(len(lines))
        host[:] = lines
        driver.upload(table, source, len(lines))
        self._free = [_Place(driver, table) for _ in range(IN_FLIGHT)]
        self._free_pages: dict[int, list[Any]] = {}
        self._chunk: tuple[int, int, memoryview] = (0, 0, memoryview(b""))
        self._flushes = driver.needs_flush()
        kernels = compiled(driver.capability, page_size)
        self._kernels = {name: self._load(kernel) for name, kernel in kernels.items()}
        self._warm_up()

    def _load(self, kernel: Any) -> tuple[int, int]:
        """The function, and the bytes of shared memory that it needs."""
        about = kernel.metadata
        if any(getattr(about, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
            raise CudaError(f"{about.name} needs scratch memory")
        return self.driver.load(kernel.asm["cubin"], about.name), about.shared

    def _warm_up(self) -> None:
        """Run each kernel, which CUDA may load at its first launch only. No row is written."""
        pages, heads = self.pages(np.zeros(1)), self._heads[:1]
        for start, job, expected in (
            (self.start_pack, self.job(pages, 0, 1, heads, stamp=1), SlotCheck.OK),
            (self.start_unpack, self.job(pages, 0, 1, heads, stamp=2), SlotCheck.STALE),
            (self.start_clear, self.job(pages, 0, 0), SlotCheck.OK),
        ):
            ticket = start([job])
            ticket.wait()
            if not ticket.done() or ticket.results() != [expected]:
                raise CudaError(f"expected {expected!r}, got {ticket.results()} {ticket.error}")

    most = MOST

    def job(
        self, pages: Pages, first: int, tokens: int, heads: range | None = None, slot: int = 0,
        stamp: int = 0,
    ) -> Job:  # fmt: skip
        """`heads`: a range of global numbers. Clearing names neither heads nor a slot: it clears
        all heads. ValueError where it lies outside."""
        own, staging = self._heads, self._staging
        wanted = own if heads is None else heads
        head, width = wanted.start - own.start, len(wanted)
        if wanted.step != 1 or not 0 <= head < head + width <= len(own):
            raise ValueError(f"{heads}: expected some of {own}")
        if min(first, tokens) < 0 or first + tokens > pages.tokens:
            raise ValueError(f"{tokens} rows from {first} on: the pages have {pages.tokens}")
        size = HEADER + tokens * width * self._in_all * UNIT
        if not 0 <= slot < staging.count or (heads is not None and size > staging.slot_bytes):
            raise ValueError(f"{tokens} tokens of {width} heads do not fit slot {slot}")
        address = (staging.address + slot * staging.slot_bytes) // UNIT
        return Job(address, pages, first, tokens, head, width, stamp)

    @property
    def can_start(self) -> bool:
        """Whether fewer than IN_FLIGHT batches are in flight."""
        return bool(self._free)

    def pages(self, numbers: Any) -> Pages:
        """Upload numbers of pages of the draft pool, once for all batches that use them."""
        found = np.ascontiguousarray(numbers, dtype=np.int32)
        if len(found) and not 0 <= found.min() <= found.max() < self._num_pages:
            raise ValueError(f"pages to {found.max()}: the pool has {self._num_pages}")
        size = 1 << max(8, (found.nbytes - 1).bit_length())
        free = self._free_pages.setdefault(size, [])
        place = address, source, host = free.pop() if free else self._new_place(size)
        pages = Pages(len(found) * self._page, place, free)
        self.driver.bind()
        host[: found.nbytes] = found.data.cast("B")
        # An earlier upload of this memory may still be queued. It comes first, and nobody needs it.
        self.driver.upload(address, source, found.nbytes)
        return pages

    def _new_place(self, size: int) -> tuple[int, int, memoryview]:
        """Addresses on the device and on the host, and the host's memory: the next of the chunk."""
        address, source, host = self._chunk
        if len(host) < size:
            address = self.driver.allocate(max(4 * PAGES, size))
            source, host = self.driver.allocate_host(max(4 * PAGES, size))
        self._chunk = address + size, source + size, host[size:]
        return address, source, host[:size]

    def start_pack(self, jobs: Sequence[Job]) -> Ticket:
        """Fill slots, no slot twice."""
        return self._start(jobs, "pack", "seal")

    def start_unpack(self, jobs: Sequence[Job]) -> Ticket:
        """Put segments into their rows, no row twice, where slots hold what the jobs say."""
        return self._start(jobs, "verify", "unpack")

    def start_clear(self, jobs: Sequence[Job]) -> Ticket:
        """Zeros in all heads of these rows."""
        return self._start(jobs, "clear")

    def _start(self, jobs: Sequence[Job], *names: str) -> Ticket:
        if not self._free or not 0 < len(jobs) <= MOST:
            raise ValueError(f"{len(jobs)} jobs, and {len(self._free)} of {IN_FLIGHT} batches free")
        place, driver = self._free[-1], self.driver
        grids = self._fill(place, jobs)
        self._free.pop()
        try:
            driver.bind()
            if self._flushes and "verify" in names:
                driver.flush()
            driver.upload(place.jobs, place.source, len(jobs) * JOB.size)
            for name in names:
                function, shared = self._kernels[name]
                driver.launch(function, grids[name], 32 * WARPS, shared, place.parameters)
            return Ticket(Event(driver), place, jobs, self._free)
        except CudaError:
            driver.drain()
            self._free.append(place)
            raise

    def _fill(self, place: _Place, jobs: Sequence[Job]) -> dict[str, Any]:
        """Write the jobs to the host's memory. The grid of each kernel."""
        tiles = blocks = 1
        for number, (address, pages, first, tokens, head, width, stamp) in enumerate(jobs):
            line = address, pages.address, first, tokens, head, width, stamp, 0
            JOB.pack_into(place.host, number * JOB.size, *line)
            tiles = max(tiles, -(-tokens // TOKENS) * -(-2 * width * self._widest // COLUMN))
            blocks = max(blocks, -(-2 * tokens * width * self._in_all // BLOCK))
        place.forget()
        move, count = (tiles, self._entries, len(jobs)), len(jobs)
        return {
            "pack": move, "seal": (count, 1, 1),
            "verify": (blocks, count, 1), "unpack": move, "clear": move,
        }  # fmt: skip


def unfit(pools: Sequence[Tensor], heads: range, staging: Any) -> str:
    """Why the kernels do not serve this pool and these slots; empty if they do."""
    if any(pool.shape[-2] != len(heads) or not pool.is_contiguous() for pool in pools):
        return f"draft rows of {tuple(pools[0].shape)}: expected heads {heads}"
    widths = {pool.shape[-1] * pool.element_size() for pool in pools}
    if any(n % UNIT for n in [*widths, *(pool.data_ptr() for pool in pools)]):
        return f"heads of {sorted(widths)} bytes: not all begin at a multiple of {UNIT} bytes"
    if (staging.address | staging.slot_bytes) % UNIT or staging.slot_bytes >= 1 << 33:
        return f"slots of {staging.slot_bytes} bytes: expected multiples of {UNIT} below 8 GiB"
    return ""


def gpu_rows(
    entries: Sequence[Tensor], heads: range, page_size: int, staging: Any
) -> GpuRows | str:
    """The kernels for this pool, or why it takes the way of rows.py."""
    device = entries[0].device
    if device.type != "cuda" or torch.version.hip:
        return f"the pool is on {device}, which is no CUDA device"
    try:
        driver = Driver(torch.cuda.current_device() if device.index is None else device.index)
        if driver.capability < OLDEST:
            return f"compute capability {driver.capability / 10}: expected {OLDEST / 10} or later"
        return GpuRows(entries, heads, page_size, staging, driver)
    except Exception as error:  # no libcuda, no ptxas, nowhere to keep what was compiled, ...
        return repr(error)[:300]
