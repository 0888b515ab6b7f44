"""Rows of slices: what a region or an extent holds, put in its place.

A region holds entry after entry, the slice's rows one after the other (kv/plan.py into_region);
an extent holds slice after slice (kv/extents.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_mixkv.kv.extents import Extents
from sglang_mixkv.kv.plan import Copies, Ints
from sglang_mixkv.kv.ranges import consecutive
from sglang_mixkv.rows.host import Buffer, RowCopy, RowNumbers, Rows


def rows_of(pages: Ints, page_size: int) -> RowNumbers:
    """Token rows of these pages, in order."""
    run = consecutive(pages) if len(pages) else None
    if run is not None:
        return range(run.start * page_size, run.stop * page_size)
    return (pages[:, None] * page_size + np.arange(page_size)).ravel()


def scatter(rows: Rows, copies: Copies, page_size: int, region_page: int, dst_pages: Ints) -> None:
    """Spread a region's rows from page `region_page` on into the pool (receiver's side).

    `copies`: from the region (src) to the pool (dst).
    """
    first, count = region_page * page_size, len(dst_pages) * page_size
    rows.copy(
        RowCopy(
            src=copies.src,
            dst=copies.dst + copies.dst_offset,
            src_stride=copies.src_row,
            dst_stride=copies.dst_row,
            width=copies.width,
            src_rows=range(first, first + count),
            dst_rows=rows_of(dst_pages, page_size),
        )
    )


@dataclass(frozen=True)
class Ordering:
    """What puts some extents in the order of rows: `tokens` of the pool, and for each slice as it
    was written, extent after extent, its number among the pool's slices."""

    tokens: Ints
    slices: Ints


def orderings(found: Extents, slices: int, most: int) -> Iterator[Ordering]:
    """These extents, at most `most` tokens at a time; a row consists of so many `slices`."""
    ends = np.cumsum(found.count)
    start = 0
    while start < len(found):
        done = ends[start] - found.count[start]
        stop = int(np.searchsorted(ends, done + most, "right"))
        yield _ordering(found.cut(start, stop), slices)
        start = stop


def _ordering(part: Extents, slices: int) -> Ordering:
    tokens = np.repeat(part.first, part.count) + _places(part.count)
    written = part.count * slices
    place, count = _places(written), np.repeat(part.count, written)
    token = np.repeat(part.first, written) + place % count
    return Ordering(tokens, token * slices + place // count)


def _places(counts: Ints) -> Ints:
    """0, 1, 2 ... of each, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def to_rows(
    rows: Rows, ptrs: Ints, row_bytes: Ints, slices: int, order: Ordering, scratch: Buffer
) -> None:
    """Put extents of the entries at `ptrs` in the order of rows, in place (receiver's side).

    `row_bytes`: of equally wide `slices`, per entry. `scratch`: room for the tokens' rows of one
    entry at least.
    """
    count = len(order.tokens)
    place = count * int(row_bytes.max())
    step = max(1, scratch.size // place)
    for first in range(0, len(ptrs), step):
        entry, whole = ptrs[first : first + step], row_bytes[first : first + step]
        aside, width = scratch.address + place * np.arange(len(entry)), whole // slices
        rows.copy(RowCopy(entry, aside, whole, whole, whole, order.tokens, range(count)))
        written = range(count * slices)
        rows.copy(RowCopy(aside, entry, width, width, width, written, order.slices))
