"""The packed path: slices are gathered into one buffer, then written in long ranges.

    P < D   a slice is the destination's whole row: pack it, write page runs into the pool
    P > D   a slice is part of the destination's row: pack it, write it into the region that
            the receiver granted; the receiver scatters when every sender has answered

Either way a chunk's slices become ranges as long as the destination is contiguous. A chunk
larger than the pack buffer goes through it in several rounds.

The rule of `auto`, for both sides: pack where the direct path would need more than
DIRECT_DESCRIPTORS ranges that average less than DIRECT_MEAN bytes. A range costs 20-25 us
on TCP, as much as 40 KiB of payload; few ranges, or long ones, are not worth a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_mixkv.core.plan import Blocks, Copies, Ints, page_runs, whole_blocks
from sglang_mixkv.transfer.rows import RowCopy, Rows

DIRECT_DESCRIPTORS = 16
DIRECT_MEAN = 16 << 10


def prefer_packed(descriptors: int, total_bytes: int, mode: str) -> bool:
    """Whether to pack what the direct path would send as so many ranges."""
    if mode != "auto":
        return mode == "packed"
    return descriptors > DIRECT_DESCRIPTORS and total_bytes < descriptors * DIRECT_MEAN


def into_region(copies: Copies, address: int, tokens: int) -> Copies:
    """The same slices, with a region of rows of just their width as the destination.

    Layout of a region: entry after entry, `tokens` rows each.
    """
    before = np.concatenate([[0], np.cumsum(copies.width)[:-1]])
    return dataclasses.replace(
        copies,
        dst=address + before * tokens,
        dst_row=copies.width,
        dst_offset=np.zeros_like(copies.width),
    )


def rows_of(pages: Ints, page_size: int) -> Ints:
    """Token rows of these pages, in order."""
    return (pages[:, None] * page_size + np.arange(page_size)).ravel()


@dataclass
class PackBuffer:
    """One thread's registered buffer, at `address`, of `size` bytes."""

    address: int
    size: int
    owner: Any

    def rounds(
        self, rows: Rows, copies: Copies, page_size: int, src_pages: Ints, dst_pages: Ints
    ) -> Iterator[Blocks]:
        """Pack and yield the ranges of one round at a time; the buffer is reused between.

        Every copy's slice must be its destination's whole row.
        """
        per_page = int(copies.width.sum()) * page_size
        step = max(1, self.size // per_page)
        for start in range(0, len(src_pages), step):
            part = slice(start, start + step)
            yield self._round(rows, copies, page_size, src_pages[part], dst_pages[part])

    def _round(
        self, rows: Rows, copies: Copies, page_size: int, src_pages: Ints, dst_pages: Ints
    ) -> Blocks:
        count = len(src_pages)
        packed = into_region(copies, self.address, count * page_size)
        rows.copy(
            RowCopy(
                src=copies.src + copies.src_offset,
                dst=packed.dst,
                src_stride=copies.src_row,
                dst_stride=copies.width,
                width=copies.width,
                src_rows=rows_of(src_pages, page_size),
                dst_rows=np.arange(count * page_size),
            )
        )
        from_buffer = dataclasses.replace(copies, src=packed.dst, src_row=copies.width)
        return whole_blocks(from_buffer, page_size, page_runs(np.arange(count), dst_pages))


def scatter(rows: Rows, copies: Copies, page_size: int, region_page: int, dst_pages: Ints) -> None:
    """Spread a region's rows from page `region_page` on into the pool (receiver's side).

    `copies`: from the region (src) to the pool (dst).
    """
    count = len(dst_pages) * page_size
    rows.copy(
        RowCopy(
            src=copies.src,
            dst=copies.dst + copies.dst_offset,
            src_stride=copies.src_row,
            dst_stride=copies.dst_row,
            width=copies.width,
            src_rows=np.arange(count) + region_page * page_size,
            dst_rows=rows_of(dst_pages, page_size),
        )
    )
