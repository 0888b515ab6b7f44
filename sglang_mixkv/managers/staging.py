"""Regions of this process's memory that packed slices go through.

Prefill: each transfer thread has a pack buffer of its own (`pack_buffer`).

Decode: one registered buffer; a request whose draft slices would be many short ranges in its
pool is granted a region of it, one area per sender. Slices that are a part of a row and get no
region (no room, or the target's) are written by extent into the request's own pages
(core/extents.py). Life of a grant, on a decode rank:

    scheduler      receiver.send_metadata -> grant()        region held
    decode thread  all senders answered   -> scatter()      region or pages -> rows, region free
    scheduler      abort or failure       -> release()      region quarantined
    decode thread  all ranks acknowledged -> drained()      region free

A failed write can still be in flight after the transport's call has returned, so a region that
was not scattered stays out of use until every contacted rank has said that nothing of the room is
in flight, or for `quarantine_s` where one never does. SGLang holds the request's pages back in the
same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from sglang_mixkv.core.allocator import RegionAllocator
from sglang_mixkv.core.extents import Extents, extents, most_tokens
from sglang_mixkv.core.geometry import Shard
from sglang_mixkv.core.plan import Copies, Ints, component_copies, runs_of
from sglang_mixkv.core.wire import Grant
from sglang_mixkv.transfer.packed import (
    PackBuffer,
    from_region,
    orderings,
    prefer_packed,
    scatter,
    to_rows,
)
from sglang_mixkv.transfer.rows import HostRows, Rows

logger = logging.getLogger(__name__)

# Twice the 30 s after which SGLang frees the pages of an aborted request whatever the
# transport does (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT).
QUARANTINE_S = 60.0

# Extents pass through scratch memory on their way to rows: at most so many bytes at once.
SCRATCH = 8 << 20

# A buffer that could not be had is not asked for again before so long.
RETRY_S = 60.0

Sender = tuple[int, int]  # prefill rank, stage
Parts = list[tuple["Slices", Ints]]  # slices that are parts of rows, and their pages


def rows_for(device: str, gpu_id: int) -> Rows:
    """The row copier of this engine's device."""
    if device != "cuda":
        return HostRows()
    from sglang_mixkv.transfer.cuda import CudaRows

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

    @cached_property
    def are_parts(self) -> bool:
        """Whether they are parts of this rank's rows: P > D."""
        return any(heads != self.shard.heads for heads in self.senders.values())

    @cached_property
    def are_cut(self) -> bool:
        """Whether they are parts of their senders' rows: P < D."""
        return any(heads != self._sent_rows(rank) for (rank, _), heads in self.senders.items())

    def _sent_rows(self, rank: int) -> range:
        return self.shard.component.spread.on_rank(self.prefill_tp, rank)

    @cached_property
    def in_row(self) -> int:
        """Slices that make a row: the same from all stages."""
        return len({rank for rank, _ in self.senders})

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Bytes per token, per entry."""
        return self.shard.rows

    @cached_property
    def row_bytes(self) -> int:
        return sum(self.rows)

    @cached_property
    def in_pool(self) -> Mapping[Sender, Copies]:
        """Each sender's heads in every entry of this rank's pool, as a destination."""
        pairs = [(i, i) for i in range(self.shard.component.entries)]
        ptrs = list(self.ptrs)
        return {
            sender: component_copies(ptrs, self.shard, ptrs, self.shard, heads, pairs)
            for sender, heads in self.senders.items()
        }

    def detour(self, pages: int, runs: int, mode: str) -> bool:
        """Whether so many pages, in so many runs here, are better not sent as they are: the
        one rule (packed.py), over the ranges that writing them into the pool takes."""
        tokens = pages * self.shard.page_size
        if self.are_parts:
            ranges = tokens * self.shard.component.entries * self.in_row
        elif self.are_cut:  # packed by their sender whatever is decided here
            ranges = runs * self.shard.component.entries
            mode = "auto" if mode == "packed" else mode
        else:
            return False  # the same rows on both sides, as the target's
        return prefer_packed(ranges, tokens * self.row_bytes, mode)

    def areas(self, address: int, tokens: int) -> dict[Sender, int]:
        """Where each sender writes into a region at `address`, one after the other."""
        found = {}
        for sender, copies in self.in_pool.items():
            found[sender] = address
            address += copies.bytes_per_token * tokens
        return found


@dataclass(frozen=True)
class Granted:
    """What has to be done with a request's pages once all of them are written.

    `start`: of its region in the buffer, None without one; `areas`: where in it each sender of
    the draft's `slices` writes those of `pages`. `parts`: slices, and the pages that they are
    written to by extents of at most `extent` tokens.
    """

    slices: Slices
    pages: Ints
    start: int | None
    areas: Mapping[Sender, int]
    parts: tuple[tuple[Slices, Ints], ...]
    extent: int
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while it is scattered


@dataclass(frozen=True)
class Leaving:
    """A region in quarantine: until that moment, or until all of `ranks` have acknowledged."""

    start: int
    until: float
    ranks: frozenset[int]


class Staging:
    """A decode rank's buffer and the grants in it. Without `buffer` it grants no regions,
    without `scratch` nothing is written by extent. `full`: requests that found no room."""

    def __init__(
        self, buffer: PackBuffer | None, rows: Rows, scratch: PackBuffer | None = None,
        quarantine_s: float = QUARANTINE_S,
    ) -> None:  # fmt: skip
        self._rows, self._scratch, self._quarantine_s = rows, scratch, quarantine_s
        self._granted: dict[int, Granted] = {}
        self._leaving: dict[int, Leaving] = {}
        self._scratch_lock = threading.Lock()
        self._asked = float("-inf")
        self.full = 0
        self._use(buffer)

    def _use(self, buffer: PackBuffer | None) -> None:
        self._buffer = buffer
        self._regions = RegionAllocator(buffer.size if buffer else 0)

    def take(self, engine: Any, size: int) -> None:
        """Take the buffer, for the first peer that needs regions."""
        now = time.monotonic()
        if self._buffer is None and now - self._asked >= RETRY_S:
            self._asked = now
            self._use(pack_buffer(engine, self._rows, size))

    @property
    def span(self) -> tuple[int, int]:
        return (self._buffer.address, self._buffer.size) if self._buffer else (0, 0)

    def grant(
        self, room: int, target: Slices, draft: Slices, pages: Ints, skip: int, mode: str,
        extents_known: bool = False,
    ) -> dict[Sender, Grant]:  # fmt: skip
        """Decide how this room's slices come: what senders have to be told, if anything.

        `pages`: all pages of the request; the drafter's window reaches those from `skip` on.
        `extents_known`: the senders can write extents other than pages.
        """
        reached = pages[skip:]
        start = self._region(draft, reached, mode)
        in_pool = [(target, pages)] + [(draft, reached)] * (start is None)
        parts = [(slices, where) for slices, where in in_pool if slices.are_parts and len(where)]
        extent = self._extent(parts, mode, extents_known)
        by_page, told = extent is not None, {}
        if by_page:
            plain = Grant(0, 0, skip, True, extent or 0)
            told = dict.fromkeys((*target.senders, *draft.senders), plain)
        areas: dict[Sender, int] = {}
        if start is not None:
            tokens = len(reached) * draft.shard.page_size
            areas = draft.areas(self.span[0] + start, tokens)
            for sender, address in areas.items():
                told[sender] = Grant(address, tokens, skip, by_page, extent or 0)
        if told:
            written = tuple(parts) if by_page else ()
            self._granted[room] = Granted(draft, reached, start, areas, written, extent or 0)
        return told

    def _region(self, draft: Slices, pages: Ints, mode: str) -> int | None:
        """Hold a region for these pages where they are worth one. None: no, or no room."""
        runs = len(runs_of(pages)[0])
        if self._buffer is None or not draft.detour(len(pages), runs, mode):
            return None
        size = draft.row_bytes * len(pages) * draft.shard.page_size
        start = self._regions.allocate(size, time.monotonic())
        self.full += start is None
        return start

    def _extent(self, parts: Parts, mode: str, known: bool) -> int | None:
        """Tokens of an extent at most (0: pages), by which all of these are written: one answer
        for a whole request. None: they are not, since each slice has to be its sender's whole
        row (then all of a row are equally wide), and ranges at least half as many."""
        wanted = any(slices.detour(len(pages), len(pages), mode) for slices, pages in parts)
        if not wanted or self._scratch is None or any(slices.are_cut for slices, _ in parts):
            return None
        size = parts[0][0].shard.page_size
        room = self._scratch.size // max(max(slices.rows) for slices, _ in parts)
        if not known:
            return 0 if 1 < size <= room else None
        most = most_tokens(size, room) if room else 0
        tokens = sum(len(pages) for _, pages in parts) * size
        found = sum(len(extents(pages, size, most)) for _, pages in parts) if most > 1 else tokens
        return most if 2 * found <= tokens else None

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
                self._retire(room, granted, frozenset())
                raise
            else:
                if granted.start is not None:
                    self._regions.free(granted.start)
            finally:
                self._granted.pop(room, None)

    def _scatter(self, granted: Granted) -> None:
        size = granted.slices.shard.page_size
        tokens = len(granted.pages) * size
        for sender, address in granted.areas.items():
            area = from_region(granted.slices.in_pool[sender], address, tokens)
            scatter(self._rows, area, size, 0, granted.pages)
        for slices, pages in granted.parts:
            self._order(slices, extents(pages, size, granted.extent))

    def _order(self, slices: Slices, found: Extents) -> None:
        """Put these extents of every entry in the order of rows."""
        assert self._scratch is not None
        ptrs, rows = np.array(slices.ptrs, np.int64), np.array(slices.rows, np.int64)
        with self._scratch_lock:
            for order in orderings(found, slices.in_row, self._scratch.size // int(rows.max())):
                to_rows(self._rows, ptrs, rows, slices.in_row, order, self._scratch)

    def release(self, room: int, ranks: frozenset[int] = frozenset()) -> None:
        """The room ended without a scatter: its region may still be written, at the longest until
        `ranks`, all that were contacted, have acknowledged that (`drained`)."""
        granted = self._granted.get(room)
        if granted is None:
            return
        with granted.lock:
            if self._granted.get(room) is granted:
                del self._granted[room]
                self._retire(room, granted, ranks)

    def _retire(self, room: int, granted: Granted, ranks: frozenset[int]) -> None:
        if granted.start is None:
            return
        now = time.monotonic()
        for other, leaving in list(self._leaving.items()):
            if leaving.until <= now:
                self._leaving.pop(other, None)
        until = now + self._quarantine_s
        self._leaving[room] = Leaving(granted.start, until, ranks)
        self._regions.retire(granted.start, until)

    def drained(self, room: int, acknowledged: Collection[int]) -> None:
        """These ranks have said that nothing of a room that ended is in flight. Its region is
        free when they are all that were contacted."""
        leaving = self._leaving.get(room)
        if leaving is None or not leaving.ranks or not leaving.ranks.issubset(acknowledged):
            return
        self._regions.reclaim(leaving.start, leaving.until)
        if self._leaving.get(room) is leaving:
            self._leaving.pop(room, None)

    def in_use(self) -> tuple[int, int]:
        """Bytes held by requests, and bytes quarantined."""
        return self._regions.in_use()

    def problems(self) -> list[str]:
        """What is wrong while no request runs: held regions, broken bookkeeping."""
        self._regions.check_integrity()
        held, _ = self._regions.in_use()
        return [f"{held} bytes of staging are held"] * bool(held or self._granted)


def prepare(
    engine: Any, rows: Rows, size: int, target: Slices, draft: Slices, mode: str,
    quarantine_s: float = QUARANTINE_S, before: Staging | None = None,
) -> Staging | None:  # fmt: skip
    """A decode rank's staging once it serves a prefill server with these slices: as `before`, or
    with the memory that its requests could come to need: a buffer of `size` bytes, scratch."""
    longest = 1 << 20
    regions = draft.detour(longest, longest, mode)
    if not regions and not target.detour(longest, longest, mode):
        return before
    staging = before or Staging(None, rows, _scratch(rows), quarantine_s)
    if regions:
        staging.take(engine, size)
    return staging


def _scratch(rows: Rows) -> PackBuffer | None:
    try:
        address, owner = rows.allocate(SCRATCH)
    except MemoryError as error:
        logger.warning("sglang-mixkv: nothing is received by extent (%s)", error)
        return None
    return PackBuffer(address, SCRATCH, owner)
