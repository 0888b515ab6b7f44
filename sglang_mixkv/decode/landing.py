"""Regions of this process's memory that packed slices go through.

Prefill: each transfer thread has a pack buffer of its own (`pack_buffer`).

Decode: one registered buffer; a request whose draft slices would be many short ranges in its
pool is granted a region of it, one area a sender. Slices that are a part of a row and get no
region (no room, or the target's) are written by page into the request's own pages. Life of
a grant, on a decode rank:

    scheduler      receiver.send_metadata -> grant()        region held
    decode thread  all senders answered   -> scatter()      region or pages -> rows, region free
    scheduler      abort or failure       -> release()      region quarantined

A failed write can still be under way after the transport's call has returned, so a region
that was not scattered stays out of use for QUARANTINE_S. The request's pages are SGLang's to
hold back, as after any failed transfer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_mixkv.decode.regions import RegionAllocator
from sglang_mixkv.kv.layout import Shard
from sglang_mixkv.kv.plan import Copies, Ints, component_copies, from_region
from sglang_mixkv.kv.ranges import runs_of
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.protocol.extension import Grant
from sglang_mixkv.rows.host import HostRows, Rows
from sglang_mixkv.rows.slices import by_page_rows, scatter
from sglang_mixkv.transport.base import prefer_packed

logger = logging.getLogger(__name__)

# Twice the 30 s after which SGLang frees the pages of an aborted request whatever the
# transport does (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT).
QUARANTINE_S = 60.0

# What pages written by page pass through on their way to rows, at most so many bytes at once.
SCRATCH = 8 << 20

Sender = tuple[int, int]  # prefill rank, stage


def rows_for(device: str, gpu_id: int) -> Rows:
    """The row copier of this engine's device."""
    if device != "cuda":
        return HostRows()
    from sglang_mixkv.rows.cuda import CudaRows

    return CudaRows(gpu_id)


def pack_buffer(engine: Any, rows: Rows, size: int) -> PackBuffer | None:
    """A registered buffer of `size` bytes, None (and a warning) when there is no memory."""
    try:
        address, owner = rows.allocate(size)
        code = engine.batch_register([address], [size])
    except MemoryError as error:
        code, address, owner = str(error), 0, None
    if code:
        logger.warning(
            "sglang-mixkv: no staging buffer of %d bytes (%s); slices go without it", size, code
        )
        return None
    return PackBuffer(address, size, owner)


@dataclass(frozen=True)
class Slices:
    """One component's heads as this rank receives them, and from whom.

    `senders`: the heads (global numbers) that each sends, at least one; `prefill_tp`: their
    attention TP.
    """

    shard: Shard
    ptrs: tuple[int, ...]
    senders: Mapping[Sender, range]
    prefill_tp: int

    @property
    def are_parts(self) -> bool:
        """Whether they are parts of this rank's rows: P > D."""
        return any(heads != self.shard.heads for heads in self.senders.values())

    @property
    def are_cut(self) -> bool:
        """Whether they are parts of their senders' rows: P < D."""
        return any(heads != self._sent_rows(rank) for (rank, _), heads in self.senders.items())

    def _sent_rows(self, rank: int) -> range:
        return self.shard.component.spread.on_rank(self.prefill_tp, rank)

    def detour(self, pages: int, runs: int, mode: str) -> bool:
        """Whether so many pages, in so many runs here, are better not sent as they are: the
        one rule (packed.py), over the ranges that writing them into the pool takes."""
        tokens = pages * self.shard.page_size
        if self.are_parts:
            ranges = tokens * self.shard.component.entries * len(self.ranks)
        elif self.are_cut:  # packed by their sender whatever is decided here
            ranges = runs * self.shard.component.entries
            mode = "auto" if mode == "packed" else mode
        else:
            return False  # the same rows on both sides, as the target's
        return prefer_packed(ranges, tokens * sum(self.shard.rows), mode)

    @property
    def ranks(self) -> dict[int, range]:
        """Heads by prefill rank: the same from all stages."""
        return {rank: heads for (rank, _), heads in self.senders.items()}

    def may_go_by_page(self) -> bool:
        """Whether that makes longer ranges, and each slice is its sender's whole row: all of
        them are equally wide then."""
        page_size = self.shard.page_size
        fits = max(self.shard.rows) * page_size <= SCRATCH
        return page_size > 1 and fits and not self.are_cut

    def in_pool(self, heads: range) -> Copies:
        """These heads in every entry of this rank's pool, as a destination."""
        pairs = [(i, i) for i in range(self.shard.component.entries)]
        ptrs = list(self.ptrs)
        return component_copies(ptrs, self.shard, ptrs, self.shard, heads, pairs)

    def entries(self) -> Iterator[Copies]:
        """Entry after entry, the slices of every rank."""
        ranks = [self.in_pool(heads) for heads in self.ranks.values()]
        for index in range(self.shard.component.entries):
            yield Copies.concat(copies.at(index) for copies in ranks)


@dataclass(frozen=True)
class Granted:
    """What has to be done with a request's pages once all of them are written.

    `start`: of its region in the buffer, None without one; `areas`: what is in the region;
    `by_page`: slices, and the pages they were written to by page.
    """

    page_size: int
    pages: Ints
    start: int | None
    areas: tuple[Copies, ...]
    by_page: tuple[tuple[Slices, Ints], ...]
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while it is scattered


class Staging:
    """A decode rank's buffer and the grants in it. Without `buffer` it grants no regions,
    without `scratch` nothing is written by page. `full`: requests that found no room."""

    def __init__(
        self, buffer: PackBuffer | None, rows: Rows, scratch: PackBuffer | None = None
    ) -> None:
        self._buffer, self._rows, self._scratch = buffer, rows, scratch
        self._regions = RegionAllocator(buffer.size if buffer else 0)
        self._granted: dict[int, Granted] = {}
        self._scratch_lock = threading.Lock()
        self.full = 0

    @property
    def span(self) -> tuple[int, int]:
        return (self._buffer.address, self._buffer.size) if self._buffer else (0, 0)

    def grant(
        self, room: int, target: Slices, draft: Slices, pages: Ints, skip: int, mode: str
    ) -> dict[Sender, Grant]:
        """Decide how this room's slices come: what senders have to be told, if anything.

        `pages`: all pages of the request; the drafter's window reaches those from `skip` on.
        """
        reached = pages[skip:]
        start = self._region(draft, reached, mode)
        in_pool = [(target, pages)] + [(draft, reached)] * (start is None)
        parts = [(slices, where) for slices, where in in_pool if slices.are_parts and len(where)]
        by_page = self._go_by_page(parts, mode)
        if start is None and not by_page:
            return {}
        told = {}
        if by_page:
            told = {
                sender: Grant(0, 0, by_page=True) for sender in (*target.senders, *draft.senders)
            }
        areas = []
        if start is not None:
            address, tokens = self.span[0] + start, len(reached) * draft.shard.page_size
            for sender, heads in draft.senders.items():
                copies = draft.in_pool(heads)
                areas.append(from_region(copies, address, tokens))
                told[sender] = Grant(address, tokens, skip, by_page)
                address += copies.bytes_per_token * tokens
        self._granted[room] = Granted(
            draft.shard.page_size, reached, start, tuple(areas), tuple(parts) if by_page else ()
        )
        return told

    def _region(self, draft: Slices, pages: Ints, mode: str) -> int | None:
        """Hold a region for these pages where they are worth one. None: no, or no room."""
        runs = len(runs_of(pages)[0])
        if self._buffer is None or not draft.detour(len(pages), runs, mode):
            return None
        size = sum(draft.shard.rows) * len(pages) * draft.shard.page_size
        start = self._regions.allocate(size, time.monotonic())
        self.full += start is None
        return start

    def _go_by_page(self, parts: list[tuple[Slices, Ints]], mode: str) -> bool:
        """Whether all of these are written by page: one answer for a whole request."""
        return (
            self._scratch is not None
            and any(slices.detour(len(pages), len(pages), mode) for slices, pages in parts)
            and all(slices.may_go_by_page() for slices, _ in parts)
        )

    def scatter(self, room: int) -> None:
        """Put what a room's senders wrote where it belongs and free its region; nothing if it
        has no grant.

        Raises whatever the copy raises; the region is then quarantined. While it runs,
        `release` of the room waits: pages are not freed under it.
        """
        granted = self._granted.get(room)
        if granted is None:
            return
        with granted.lock:  # the room's own: the scheduler's other rooms never wait for a copy
            if self._granted.get(room) is not granted:
                return
            try:
                self._scatter(granted)
            except Exception:
                self._retire(granted)
                raise
            else:
                if granted.start is not None:
                    self._regions.free(granted.start)
            finally:
                self._granted.pop(room, None)

    def _scatter(self, granted: Granted) -> None:
        for area in granted.areas:
            scatter(self._rows, area, granted.page_size, 0, granted.pages)
        for slices, pages in granted.by_page:
            assert self._scratch is not None
            with self._scratch_lock:
                for entry in slices.entries():
                    by_page_rows(self._rows, entry, granted.page_size, pages, self._scratch)

    def release(self, room: int) -> None:
        """The room ended without a scatter: its region may still be written."""
        granted = self._granted.get(room)
        if granted is None:
            return
        with granted.lock:
            if self._granted.get(room) is granted:
                del self._granted[room]
                self._retire(granted)

    def _retire(self, granted: Granted) -> None:
        if granted.start is not None:
            self._regions.retire(granted.start, time.monotonic() + QUARANTINE_S)

    def in_use(self) -> tuple[int, int]:
        """Bytes held by requests, and bytes quarantined."""
        return self._regions.in_use()

    def problems(self) -> list[str]:
        """What is wrong while no request runs: held regions, broken bookkeeping."""
        self._regions.check_integrity()
        held, _ = self._regions.in_use()
        return [f"{held} bytes of staging are held"] * bool(held or self._granted)


def prepare(
    engine: Any, rows: Rows, size: int, target: Slices, draft: Slices, mode: str
) -> Staging | None:
    """A decode rank's staging for a prefill server with these slices, None if it needs none.

    Takes the memory that requests could come to need: a buffer of `size` bytes, scratch.
    """
    longest = 1 << 20
    regions = draft.detour(longest, longest, mode)
    if not regions and not target.detour(longest, longest, mode):
        return None
    try:
        address, owner = rows.allocate(SCRATCH)
        scratch = PackBuffer(address, SCRATCH, owner)
    except MemoryError as error:
        logger.warning("sglang-mixkv: nothing is received by page (%s)", error)
        scratch = None
    return Staging(pack_buffer(engine, rows, size) if regions else None, rows, scratch)
