"""Serving without draft KV: what `--mixkv-on-draft-mismatch cold` does on the decode side.

The target's KV is all that the output depends on. What the drafter would read of a cold
request is cleared before the transfer: its pages, so that no other request's bytes remain in
them, and its rows of the metadata buffers. Cold pages never become a shared prefix, since
decode's radix cache and `cold` are refused together (startup.py).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from sglang.srt.environ import envs

from sglang_mixkv.core.geometry import Shard
from sglang_mixkv.core.plan import Ints
from sglang_mixkv.transfer.packed import rows_of
from sglang_mixkv.transfer.rows import RowCopy, Rows

# disaggregation/utils.py MetadataBuffers.get_buf_infos: rows before the drafter's three
# (top-k p, top-k index, hidden states), and those of a sampling mask.
AUX_BEFORE_DRAFT = 6
AUX_OF_SAMPLING_MASK = 3


def draft_aux() -> tuple[int, ...]:
    """Numbers of the metadata rows that only the drafter reads."""
    mask = AUX_OF_SAMPLING_MASK if envs.SGLANG_ENABLE_DISAGG_SAMPLING_MASK.get() else 0
    first = AUX_BEFORE_DRAFT + mask
    return (first, first + 1, first + 2)


class Clearer:
    """Writes zeros where a cold request's draft KV and metadata would have come."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._size = 0
        self._address, self._owner = 0, None

    def clear(self, draft: Shard, ptrs: tuple[int, ...], pages: Ints) -> None:
        """Zero these pages of every draft entry. MemoryError where one row of zeros finds no room.

        One row of zeros is the source of every row: its stride is 0.
        """
        width = np.array(draft.rows, np.int64)
        if self._size < width.max():
            size = int(width.max())
            self._address, self._owner = self._rows.allocate(size)
            self._size = size  # only now: where this raised, the next request asks again
        dst_rows = rows_of(np.asarray(pages, np.int64), draft.page_size)
        self._rows.copy(
            RowCopy(
                src=np.full_like(width, self._address),
                dst=np.array(ptrs, np.int64),
                src_stride=np.zeros_like(width),
                dst_stride=width,
                width=width,
                src_rows=np.zeros(len(dst_rows), np.int64),
                dst_rows=dst_rows,
            )
        )


def clear_aux(kv_args: Any, row: int, numbers: tuple[int, ...]) -> None:
    """Zero the drafter's part of metadata row `row`: host memory."""
    for i in numbers:
        size = kv_args.aux_item_lens[i]
        ctypes.memset(kv_args.aux_data_ptrs[i] + row * size, 0, size)
