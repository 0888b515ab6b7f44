"""TODO."""

from __future__ import annotations

import numpy as np

from sglang_mixkv.kv.plan import Copies, Ints, from_region
from sglang_mixkv.kv.ranges import consecutive
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.rows.host import RowCopy, RowNumbers, Rows


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
