"""The packed path: slices are gathered into one buffer, then written in long ranges.

    P < D   a slice is the destination's whole row: pack it, write page runs into the pool, or,
            where those are short, into a region that the receiver granted
    P > D   a slice is part of the destination's row: pack it, write it into the region that
            the receiver granted; the receiver scatters when every sender has answered

Either way a chunk's slices become ranges as long as the destination is contiguous. A chunk
larger than the pack buffer goes through it in several rounds. Where a copy takes about as long
as the write, so does a smaller one, in a few rounds that begin small: while one is on the wire
the next is packed (ahead.py), so that little but the first has to be waited for.

Without room for a region, slices that are part of a row go by extent (core/extents.py): a range
per run of neighbouring tokens into the request's own pages, which the receiver then puts in the
order of rows (`to_rows`).

The rule of `auto`, for both sides: take the longer way where the shorter would need more than
DIRECT_DESCRIPTORS ranges that average less than DIRECT_MEAN bytes. A range costs 20-25 us on
TCP, as much as the copy of some 150 KiB, or of 75 KiB at both ends; few ranges, or long ones,
are not worth one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_mixkv.core.extents import Extents
from sglang_mixkv.core.plan import Blocks, Copies, Ints, PagePairs, consecutive, run_blocks
from sglang_mixkv.transfer.rows import RowCopy, RowNumbers, Rows

DIRECT_DESCRIPTORS = 16
DIRECT_MEAN = 96 << 10
FIRST_ROUND = 256 << 10  # bytes of an entry, so that rounds do not make ranges short
MANY_ROUNDS = 4  # as large as the first; with less than that, one round is as fast
GROWTH = 4  # a round to the one before: each costs turns of Python's lock


def prefer_packed(descriptors: int, total_bytes: int, mode: str) -> bool:
    """Whether to avoid sending so many bytes as so many ranges."""
    if mode != "auto":
        return mode == "packed"
    return descriptors > DIRECT_DESCRIPTORS and total_bytes < descriptors * DIRECT_MEAN


def into_region(copies: Copies, address: int, tokens: int) -> Copies:
    """The same slices, with a region of rows of just their width as the destination.

    Layout of a region: entry after entry, `tokens` rows each.
    """
    return copies.region.placed(address, tokens)


def from_region(copies: Copies, address: int, tokens: int) -> Copies:
    """The same slices, with such a region as the source."""
    region = into_region(copies, address, tokens)
    return Copies(
        region.dst, copies.dst, copies.width, copies.dst_row, region.dst_offset,
        copies.dst_offset, copies.width,
    )  # fmt: skip


def rows_of(pages: Ints, page_size: int) -> RowNumbers:
    """Token rows of these pages, in order."""
    run = consecutive(pages) if len(pages) else None
    if run is not None:
        return range(run.start * page_size, run.stop * page_size)
    return (pages[:, None] * page_size + np.arange(page_size)).ravel()


@dataclass(frozen=True)
class Packing:
    """Copies that go through the pack buffer. `cuts`: the pages of each round."""

    copies: Copies
    pairs: PagePairs
    cuts: list[range]


@dataclass
class PackBuffer:
    """One thread's registered buffer, at `address`, of `size` bytes."""

    address: int
    size: int
    owner: Any

    def cuts(self, copies: Copies, page_size: int, pages: int, overlap: bool) -> list[range]:
        """The pages of each round. `overlap`: one can be packed while others are on the wire.
        A page of all entries must fit."""
        per_page = copies.bytes_per_token * page_size
        size = most = self.size // per_page
        first = max(1, len(copies) * FIRST_ROUND // per_page)
        if overlap and most > 1 and pages >= MANY_ROUNDS * first:
            most //= 2
            size = min(most, first)
        found, start = [], 0
        while start < pages:
            found.append(range(start, min(pages, start + size)))
            start, size = start + size, min(most, GROWTH * size)
        return found

    def rounds(
        self, rows: Rows, page_size: int, packings: list[Packing], settle: Callable[[], int]
    ) -> Iterator[Blocks]:
        """Pack and yield the ranges of one round at a time.

        `settle`: wait until nothing reads the buffer; called before any of it is used again.
        No more rounds after it returned another code than 0. Every copy's slice must be
        its destination's whole row.
        """
        at = self.size
        for packing in packings:
            copies = packing.copies
            for pages in packing.cuts:
                need = len(pages) * copies.bytes_per_token * page_size
                if at + need > self.size:
                    if settle():
                        return
                    at = 0
                pairs = packing.pairs.only(pages)
                yield self._round(rows, copies, page_size, pairs, self.address + at)
                at += need

    @staticmethod
    def _round(
        rows: Rows, copies: Copies, page_size: int, pairs: PagePairs, address: int
    ) -> Blocks:
        tokens = len(pairs) * page_size
        area = address + copies.region.dst * tokens
        rows.copy(
            RowCopy(
                src=copies.slices,
                dst=area,
                src_stride=copies.src_row,
                dst_stride=copies.width,
                width=copies.width,
                src_rows=rows_of(pairs.src, page_size),
                dst_rows=range(tokens),
            )
        )
        return run_blocks(area, copies.dst, copies.width * page_size, pairs.dst_runs)


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
    rows: Rows, ptrs: Ints, row_bytes: Ints, slices: int, order: Ordering, scratch: PackBuffer
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
