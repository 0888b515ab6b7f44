"""The packed path: slices are gathered into one buffer, then written in long ranges.

    P < D   a slice is the destination's whole row: pack it, write page runs into the pool, or,
            where those are short, into a region that the receiver granted
    P > D   a slice is part of the destination's row: pack it, write it into the region that
            the receiver granted; the receiver scatters when every sender has answered

Either way a chunk's slices become ranges as long as the destination is contiguous. A chunk
larger than the pack buffer goes through it in several rounds.

Without room for a region, slices that are part of a row go by page (`by_page_rows`): a range
a page into the destination's own pages, which the receiver then puts in the order of rows.

The rule of `auto`, for both sides: take the longer way where the shorter would need more than
DIRECT_DESCRIPTORS ranges that average less than DIRECT_MEAN bytes. A range costs 20-25 us on
TCP, as much as the copy of some 150 KiB, or of 75 KiB at both ends; few ranges, or long ones,
are not worth one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_mixkv.core.plan import Blocks, Copies, Ints, PagePairs, whole_blocks
from sglang_mixkv.transfer.rows import RowCopy, RowNumbers, Rows, consecutive

DIRECT_DESCRIPTORS = 16
DIRECT_MEAN = 96 << 10


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


@dataclass
class PackBuffer:
    """One thread's registered buffer, at `address`, of `size` bytes."""

    address: int
    size: int
    owner: Any

    def rounds(
        self, rows: Rows, copies: Copies, page_size: int, pairs: PagePairs
    ) -> Iterator[Blocks]:
        """Pack and yield the ranges of one round at a time; the buffer is reused between.

        Every copy's slice must be its destination's whole row.
        """
        step = max(1, self.size // (copies.bytes_per_token * page_size))
        for start in range(0, len(pairs), step):
            part = pairs if step >= len(pairs) else pairs.cut(start, start + step)
            yield self._round(rows, copies, page_size, part)

    def _round(self, rows: Rows, copies: Copies, page_size: int, pairs: PagePairs) -> Blocks:
        tokens = len(pairs) * page_size
        packed = from_region(copies, self.address, tokens)
        rows.copy(
            RowCopy(
                src=copies.src + copies.src_offset,
                dst=packed.src,
                src_stride=copies.src_row,
                dst_stride=copies.width,
                width=copies.width,
                src_rows=rows_of(pairs.src, page_size),
                dst_rows=range(tokens),
            )
        )
        return whole_blocks(packed, page_size, pairs.dst_runs)


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


def by_page_rows(
    rows: Rows, copies: Copies, page_size: int, pages: Ints, scratch: PackBuffer
) -> None:
    """Put pages that were written by page (Copies.paged) in the order of rows, in place.

    `copies`: the slices of all senders of one entry; equally wide, together its row.
    `scratch`: room for one page of it at least.

        as written   | h0 of token 0, 1, 2, ... | h1 of token 0, 1, 2, ... |
        in rows      | h0 h1 | h0 h1 | h0 h1 | ...
    """
    step = max(1, scratch.size // (copies.bytes_per_token * page_size))
    for start in range(0, len(pages), step):
        part = pages[start : start + step]
        tokens = len(part) * page_size
        aside = from_region(copies, scratch.address, tokens)
        rows.copy(
            RowCopy(
                src=copies.dst + copies.dst_offset * page_size,
                dst=aside.src,
                src_stride=copies.width,
                dst_stride=copies.width,
                width=copies.width,
                src_rows=rows_of(part * len(copies), page_size),
                dst_rows=range(tokens),
            )
        )
        scatter(rows, aside, page_size, 0, part)
