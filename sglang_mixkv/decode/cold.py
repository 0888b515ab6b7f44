"""Serving without draft KV: what `--mixkv-on-draft-mismatch cold` does on the decode side.

The target's KV is all that the output depends on. What the drafter would read of a cold
request is cleared before the transfer: its pages, so that no other request's bytes remain in
them, and its rows of the metadata buffers. Cold pages never become a shared prefix, since
decode's radix cache and `cold` are refused together (refusals.py).
"""

from __future__ import annotations

import ctypes

import numpy as np

from sglang_mixkv.kv.layout import Shard
from sglang_mixkv.kv.plan import Ints
from sglang_mixkv.rows.host import Buffer, RowCopy, Rows
from sglang_mixkv.rows.slices import rows_of


class Clearer:
    """Writes zeros where a cold request's draft KV and metadata would have come."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._zeros: Buffer | None = None

    def clear(self, draft: Shard, ptrs: tuple[int, ...], pages: Ints) -> None:
        """Zero these pages of every draft entry. MemoryError where one row of zeros finds no room.

        One row of zeros is the source of every row: its stride is 0.
        """
        width = np.array(draft.rows, np.int64)
        if self._zeros is None or self._zeros.size < width.max():
            self._zeros = self._rows.allocate(int(width.max()))
        dst_rows = rows_of(np.asarray(pages, np.int64), draft.page_size)
        self._rows.copy(
            RowCopy(
                src=np.full_like(width, self._zeros.address),
                dst=np.array(ptrs, np.int64),
                src_stride=np.zeros_like(width),
                dst_stride=width,
                width=width,
                src_rows=np.zeros(len(dst_rows), np.int64),
                dst_rows=dst_rows,
            )
        )


def clear_aux(
    ptrs: tuple[int, ...], lens: tuple[int, ...], row: int, numbers: tuple[int, ...]
) -> None:
    """Zero row `row` of these metadata buffers: host memory, `lens` bytes per row."""
    for i in numbers:
        ctypes.memset(ptrs[i] + row * lens[i], 0, lens[i])
