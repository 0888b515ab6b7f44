"""Regions of this process's memory that packed slices go through.

Prefill: each transfer thread has a pack buffer of its own (`pack_buffer`).

Decode: one registered buffer; a request whose draft slices are strided in its pool is
granted a region of it, one area a sender. Life of a grant, on a decode rank:

    scheduler      receiver.send_metadata -> grant()        region held; none: direct path
    decode thread  all senders answered   -> scatter()      region -> pool, region free
    scheduler      abort or failure       -> release()      region quarantined

A failed write can still be under way after the transport's call has returned, so a region
that was not scattered stays out of use for QUARANTINE_S.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_mixkv.core.allocator import RegionAllocator
from sglang_mixkv.core.geometry import Shard
from sglang_mixkv.core.plan import Copies, Ints, component_copies
from sglang_mixkv.core.routes import Route
from sglang_mixkv.core.wire import Grant
from sglang_mixkv.transfer.packed import PackBuffer, into_region, prefer_packed, scatter
from sglang_mixkv.transfer.rows import HostRows, Rows

logger = logging.getLogger(__name__)

# Twice the 30 s after which SGLang frees the pages of an aborted request whatever the
# transport does (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT).
QUARANTINE_S = 60.0


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
            "sglang-mixkv: no staging buffer of %d bytes (%s); the direct path is used", size, code
        )
        return None
    return PackBuffer(address, size, owner)


@dataclass(frozen=True)
class Granted:
    """A request's region: where it starts in the buffer, and what is scattered from it."""

    start: int
    page_size: int
    pages: Ints
    skip: int
    areas: tuple[Copies, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while it is scattered


class Staging:
    """A decode rank's buffer and the grants in it."""

    def __init__(self, buffer: PackBuffer, rows: Rows) -> None:
        self._buffer, self._rows = buffer, rows
        self._regions = RegionAllocator(buffer.size)
        self._granted: dict[int, Granted] = {}

    @property
    def span(self) -> tuple[int, int]:
        return self._buffer.address, self._buffer.size

    def grant(
        self, room: int, draft: Shard, ptrs: tuple[int, ...], pages: Ints, skip: int,
        routes: Iterable[Route],
    ) -> dict[tuple[int, int], Grant] | None:  # fmt: skip
        """Hold a region for this room: (prefill rank, stage) -> its area. None: no room."""
        senders = [route for route in routes if route.is_send_draft]
        tokens = len(pages) * draft.page_size
        sizes = [sum(draft.head_bytes) * len(route.draft_heads) * tokens for route in senders]
        start = self._regions.allocate(sum(sizes), time.monotonic())
        if start is None:
            return None
        areas, grants, address = [], {}, self._buffer.address + start
        for route, size in zip(senders, sizes, strict=True):
            areas.append(_area(draft, ptrs, route, address, tokens))
            grants[route.prefill_rank, route.stage] = Grant(address, tokens)
            address += size
        self._granted[room] = Granted(start, draft.page_size, pages, skip, tuple(areas))
        return grants

    def scatter(self, room: int) -> None:
        """Spread a room's region into the pool and free it; nothing if it has none.

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
                for area in granted.areas:
                    pages = granted.pages[granted.skip :]
                    scatter(self._rows, area, granted.page_size, granted.skip, pages)
            except Exception:
                self._retire(granted)
                raise
            else:
                self._regions.free(granted.start)
            finally:
                self._granted.pop(room, None)

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
        self._regions.retire(granted.start, time.monotonic() + QUARANTINE_S)

    def in_use(self) -> tuple[int, int]:
        """Bytes held by requests, and bytes quarantined."""
        return self._regions.in_use()

    def problems(self) -> list[str]:
        """What is wrong while no request runs: held regions, broken bookkeeping."""
        self._regions.check_integrity()
        held, _ = self._regions.in_use()
        return [f"{held} bytes of staging are held"] * bool(held or self._granted)


def _area(draft: Shard, ptrs: tuple[int, ...], route: Route, address: int, tokens: int) -> Copies:
    """From one sender's area (src) to this rank's pool (dst)."""
    pairs = [(i, i) for i in range(draft.component.entries)]
    in_pool = component_copies(list(ptrs), draft, list(ptrs), draft, route.draft_heads, pairs)
    area = into_region(in_pool, address, tokens)
    return Copies(
        src=area.dst,
        dst=in_pool.dst,
        src_row=in_pool.width,
        dst_row=in_pool.dst_row,
        src_offset=np.zeros_like(in_pool.width),
        dst_offset=in_pool.dst_offset,
        width=in_pool.width,
    )


def wants_region(draft: Shard, routes: Iterable[Route], pages: int, mode: str) -> bool:
    """Whether a request's draft slices are strided here and worth a region, by the one rule."""
    senders = [route for route in routes if route.is_send_draft]
    if all(route.draft_heads == draft.heads for route in senders):
        return False  # each slice is a whole row of this rank's pool
    tokens = pages * draft.page_size
    descriptors = tokens * draft.component.entries * len(senders)
    return prefer_packed(descriptors, sum(draft.rows) * tokens, mode)
