"""Where head slices land on a decode rank that cannot simply be written into its rows.

One registered buffer: a request whose draft slices would be many short ranges in its pool is
granted a region of it, one area per sender. Slices that are a part of a row and get no region
(no room, or the target's) are written by extent into the request's own pages (kv/extents.py).
Life of what a room holds here:

    scheduler      metadata is about to go out -> grant()      region held
    decode thread  all senders answered        -> scatter()    region or pages -> rows, region free
    scheduler      abort or failure            -> release()    region in quarantine
    decode thread  all ranks acknowledged      -> drained()    region free

A failed write can still be in flight after the transport's call has returned, so a region that
was not scattered stays out of use until every contacted rank has said that nothing of the room is
in flight, or for `quarantine_s` where one never does. SGLang holds the request's pages back in
the same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from sglang_mixkv.config import Config
from sglang_mixkv.decode.regions import RegionAllocator
from sglang_mixkv.decode.slices import Sender, Slices
from sglang_mixkv.kv.extents import Extents, extents, most_tokens
from sglang_mixkv.kv.plan import Ints, from_region
from sglang_mixkv.kv.ranges import runs_of
from sglang_mixkv.protocol.extension import Grant
from sglang_mixkv.rows.host import Buffer, Rows
from sglang_mixkv.rows.slices import orderings, scatter, to_rows
from sglang_mixkv.stats import Stats
from sglang_mixkv.transport.base import Transport

logger = logging.getLogger(__name__)

# Twice the 30 s after which SGLang frees the pages of an aborted request whatever the
# transport does (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT).
QUARANTINE_S = 60.0

# Extents pass through scratch memory on their way to rows: at most so many bytes at once.
SCRATCH = 8 << 20

# Memory that could not be had is not asked for again before so long.
RETRY_S = 60.0

# A request so long needs regions, if any request from a server does.
LONG_PAGES = 1 << 20

Parts = list[tuple[Slices, Ints]]  # slices, and their pages


@dataclass(frozen=True)
class Area:
    """Where in the buffer a sender writes its part of these slices of `pages`."""

    slices: Slices
    address: int
    pages: Ints


@dataclass(frozen=True)
class Held:
    """What has to be done with a request's pages once all of them are written.

    `start`: of its region in the buffer, None without one; `areas`: those of each sender in it.
    `parts`: slices, and the pages that they are written to by extents of at most `extent` tokens.
    """

    start: int | None
    areas: Mapping[Sender, list[Area]]
    parts: tuple[tuple[Slices, Ints], ...]
    extent: int
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while it is scattered


@dataclass(frozen=True)
class Leaving:
    """A region in quarantine: until that moment, or until all of `ranks` have acknowledged."""

    start: int
    until: float
    ranks: frozenset[int]


class Landing:
    """A decode rank's buffer and scratch, each taken when the first peer needs it, and what rooms
    hold of them. Without a buffer there are no regions, without scratch no extents."""

    def __init__(
        self, rows: Rows, config: Config, stats: Stats, quarantine_s: float = QUARANTINE_S
    ) -> None:
        self._rows, self._stats, self._quarantine_s = rows, stats, quarantine_s
        self._mode, self._size = config.draft_transfer, config.staging_mb << 20
        self._transport: Transport | None = None
        self._buffer: Buffer | None = None
        self._scratch: Buffer | None = None
        self._regions = RegionAllocator(0)
        self._next_try = 0.0
        self._held: dict[int, Held] = {}
        self._leaving: dict[int, Leaving] = {}
        self._scratch_lock = threading.Lock()

    def connect(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def span(self) -> tuple[int, int]:
        """Address and bytes of the buffer."""
        return (self._buffer.address, self._buffer.size) if self._buffer else (0, 0)

    # -- memory

    @property
    def asks_again(self) -> bool:
        """Whether memory could not be had, and a minute has passed."""
        return bool(self._next_try) and time.monotonic() >= self._next_try

    def prepare(self, target: Slices, draft: tuple[Slices, ...]) -> None:
        """Take the memory that requests with these slices could come to need."""
        if not draft:
            return
        regions = any(self._worth_a_copy(slices, LONG_PAGES, LONG_PAGES) for slices in draft)
        if not regions and not self._worth_a_copy(target, LONG_PAGES, LONG_PAGES):
            return
        missing = self._scratch is None or (regions and self._buffer is None)
        if missing and time.monotonic() >= self._next_try:
            self._take(regions=regions)
        self._show()

    def _take(self, *, regions: bool) -> None:
        assert self._transport is not None
        self._next_try = time.monotonic() + RETRY_S
        try:
            self._scratch = self._scratch or self._rows.allocate(SCRATCH)
            if regions and self._buffer is None:
                buffer = self._rows.allocate(self._size)
                self._transport.register(buffer.address, buffer.size)
                self._buffer, self._regions = buffer, RegionAllocator(buffer.size)
        except Exception as error:  # an allocator's own kinds too: the scheduler asks
            logger.warning(
                "[MIXKV-MEM-01] sglang-mixkv: no staging buffer of %d bytes (%r); slices go "
                "without it",
                self._size, error,
            )  # fmt: skip
        else:
            self._next_try = 0.0

    def _worth_a_copy(self, slices: Slices, pages: int, runs: int) -> bool:
        assert self._transport is not None
        return slices.worth_a_copy(pages, runs, self._transport.limits, self._mode)

    # -- rooms

    def begin(self, room: int) -> None:
        """Another request has this number. Acknowledgements are about that one from now on: what
        the one before it held stays out of use for its time."""
        self._leaving.pop(room, None)

    def grant(
        self, room: int, target: Slices, draft: tuple[Slices, ...], pages: Ints, *,
        told: tuple[int, int], knows_extents: bool,
    ) -> dict[Sender, Grant]:  # fmt: skip
        """Decide how this room's slices come: what senders have to be told, if anything.

        `draft`: by window, at least one; `pages`: all pages of the request, as SGLang numbers
        them. `told`: the span that the senders know of: they reject a region elsewhere.
        `knows_extents`: they can write extents other than pages.
        """
        drafted = draft[0].shard.numbered(pages)
        skips = [slices.first_page(len(drafted)) for slices in draft]
        reached = [(slices, drafted[skip:]) for slices, skip in zip(draft, skips, strict=True)]
        start = self._region(reached) if told == self.span else None
        skip = min(skips)
        try:
            return self._granted(room, target, pages, reached, skip, start, known=knows_extents)
        except Exception:
            if start is not None:  # no sender has heard of it
                self._regions.free(start)
            raise

    def _granted(
        self, room: int, target: Slices, pages: Ints, draft: Parts, skip: int,
        start: int | None, *, known: bool,
    ) -> dict[Sender, Grant]:  # fmt: skip
        """With the region that starts there, or none. `skip`: pages before all of `draft`."""
        in_pool = [(target, pages), *(draft if start is None else ())]
        parts = [(slices, where) for slices, where in in_pool if slices.are_parts and len(where)]
        extent = self._extent(parts, known)
        by_page, told = extent is not None, {}
        if by_page:
            plain = Grant(0, 0, skip, True, extent or 0)
            told = dict.fromkeys((*target.senders, *draft[0][0].senders), plain)
        areas: dict[Sender, list[Area]] = {}
        if start is not None:
            tokens = max(len(p) * slices.shard.page_size for slices, p in draft)
            areas = _areas(draft, self.span[0] + start)
            for sender, (first, *_) in areas.items():
                told[sender] = Grant(first.address, tokens, skip, by_page, extent or 0)
        if told:
            written = tuple(parts) if by_page else ()
            self._held[room] = Held(start, areas, written, extent or 0)
        self._show()
        return told

    def _region(self, draft: Parts) -> int | None:
        """Hold a region for these pages where they are worth one. None: no, or no room."""
        if self._buffer is None:
            return None
        if not any(self._worth_a_copy(s, len(pages), len(runs_of(pages)[0])) for s, pages in draft):
            return None
        size = sum(s.row_bytes * len(pages) * s.shard.page_size for s, pages in draft)
        start = self._regions.allocate(size, time.monotonic())
        self._stats.add(staging_full=int(start is None))
        return start

    def _extent(self, parts: Parts, known: bool) -> int | None:
        """Tokens of an extent at most (0: pages), by which all of these are written: one answer
        for a whole request. None: they are not, since each slice has to be its sender's whole
        row (then all of a row are equally wide), and ranges at least half as many."""
        wanted = any(self._worth_a_copy(slices, len(p), len(p)) for slices, p in parts)
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
        holds none.

        Raises whatever the copy raises; the region is then quarantined. While it runs,
        `release` of the room waits: pages are not freed under it.
        """
        held = self._held.get(room)
        if held is None:
            return
        with held.lock:  # the room's own: the scheduler's other rooms never wait for a copy
            if self._held.get(room) is not held:
                return
            try:
                self._scatter(held)
            except Exception:
                self._retire(room, held, frozenset())
                raise
            else:
                if held.start is not None:
                    self._regions.free(held.start)
            finally:
                self._held.pop(room, None)
                self._show()

    def _scatter(self, held: Held) -> None:
        for sender, areas in held.areas.items():
            for area in areas:
                size, copies = area.slices.shard.page_size, area.slices.in_pool[sender]
                there = from_region(copies, area.address, len(area.pages) * size)
                scatter(self._rows, there, size, 0, area.pages)
        for slices, pages in held.parts:
            self._order(slices, extents(pages, slices.shard.page_size, held.extent))

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
        held = self._held.get(room)
        if held is None:
            return
        with held.lock:
            if self._held.get(room) is held:
                del self._held[room]
                self._retire(room, held, ranks)
        self._show()

    def _retire(self, room: int, held: Held, ranks: frozenset[int]) -> None:
        if held.start is None:
            return
        now = time.monotonic()
        for other, leaving in list(self._leaving.items()):
            if leaving.until <= now:
                self._leaving.pop(other, None)
        until = now + self._quarantine_s
        self._leaving[room] = Leaving(held.start, until, ranks)
        self._regions.retire(held.start, until)

    def drained(self, room: int, acknowledged: Collection[int]) -> None:
        """These ranks have said that nothing of a room that ended is in flight. Its region is
        free when they are all that were contacted."""
        leaving = self._leaving.get(room)
        if leaving is None or not leaving.ranks or not leaving.ranks.issubset(acknowledged):
            return
        self._regions.reclaim(leaving.start, leaving.until)
        if self._leaving.get(room) is leaving:
            self._leaving.pop(room, None)
        self._show()

    # -- what it holds

    def in_use(self) -> tuple[int, int]:
        """Bytes held by requests, and bytes quarantined."""
        return self._regions.in_use()

    def _show(self) -> None:
        if self._buffer is not None:
            self._stats.staging(lambda: sum(self.in_use()), self.span[1])

    def problems(self) -> list[str]:
        """What is wrong while no request runs: regions that are held, books that do not agree."""
        found = self._regions.problems()
        held, _ = self._regions.in_use()
        if held or self._held:
            found.append(f"{len(self._held)} rooms hold {held} bytes of staging")
        return found


def _areas(draft: Parts, address: int) -> dict[Sender, list[Area]]:
    """Those of each sender in a region at `address`, one after the other."""
    found: dict[Sender, list[Area]] = {sender: [] for sender in draft[0][0].senders}
    for sender, areas in found.items():
        for slices, pages in draft:
            areas.append(Area(slices, address, pages))
            tokens = len(pages) * slices.shard.page_size
            address += slices.in_pool[sender].bytes_per_token * tokens
    return found
