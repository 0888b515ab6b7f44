"""A Triton kernel that copies rows, beside which part_rows measures the product's own copies.

Of entry e, row `src_rows[n]` at the source becomes row `dst_rows[n]` at the destination:

    width[e] bytes   from  src[e] + src_rows[n] * src_stride[e]
                     to    dst[e] + dst_rows[n] * dst_stride[e]

It copies words of 16, 8, 4, 2 or 1 bytes, the widest that all addresses, strides and widths of the
call are multiples of. A program copies TILE words: of so many rows LINE bytes each. Wider rows are
cut into columns, so a size of word is one compiled variant whatever the rows. The product does not
import it: it stays until a GPU has shown whether torch's copies are fast enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

Ints = np.ndarray[Any, np.dtype[np.int64]]

TILE = 512  # words: four for each thread of a program
LINE = 128  # bytes of a row side by side: one cache line
WORDS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
"""Words by their bytes: a type, and how many of it."""


class RowCopy(NamedTuple):
    """Addresses, strides and widths in bytes, one per entry; row numbers, one per row."""

    src: Ints
    dst: Ints
    src_stride: Ints
    dst_stride: Ints
    width: Ints
    src_rows: Ints
    dst_rows: Ints


@triton.jit(do_not_specialize=["entries", "rows", "n_rows", "n_columns"])
def copy_rows(
    entries,  # int64 [E, 5]: src, dst; src, dst stride; width; all in words
    rows,  # int64 [2, N]: src, dst row numbers
    n_rows,
    n_columns,  # of LINE bytes, in the widest row
    TYPE: tl.constexpr,
    PAIR: tl.constexpr,  # of TYPE in a word: neighbours that Triton reads and writes as one
    BLOCK: tl.constexpr,
    COLUMN: tl.constexpr,
):
    entry = entries + tl.program_id(1) * 5
    word: tl.constexpr = PAIR * (TYPE.primitive_bitwidth // 8)
    src = tl.multiple_of((tl.load(entry) * word).to(tl.pointer_type(TYPE)), word)
    dst = tl.multiple_of((tl.load(entry + 1) * word).to(tl.pointer_type(TYPE)), word)
    src_stride = tl.load(entry + 2) * PAIR
    dst_stride = tl.load(entry + 3) * PAIR
    width = tl.load(entry + 4) * PAIR
    place = tl.program_id(0).to(tl.int64)
    at = place // n_columns * BLOCK + tl.arange(0, BLOCK)
    column = place % n_columns * (COLUMN * PAIR) + tl.arange(0, COLUMN * PAIR)
    live = at < n_rows
    src_row = tl.load(rows + at, mask=live, other=0)
    dst_row = tl.load(rows + n_rows + at, mask=live, other=0)
    mask = live[:, None] & (column < width)[None, :]
    data = tl.load(src + src_row[:, None] * src_stride + column[None, :], mask=mask)
    tl.store(dst + dst_row[:, None] * dst_stride + column[None, :], data, mask=mask)


def variant(word: int) -> dict[str, Any]:
    """What the kernel is compiled with for words of so many bytes."""
    kind, pair = WORDS[word]
    return {"TYPE": kind, "PAIR": pair, "BLOCK": TILE * word // LINE, "COLUMN": LINE // word}


def word_bytes(what: RowCopy) -> int:
    """The widest word that everything in this copy is a multiple of."""
    together = int(np.bitwise_or.reduce(np.concatenate(what[:5])))
    return next(word for word in WORDS if together % word == 0)


def prepared(what: RowCopy, device: torch.device | str) -> Callable[[], Any]:
    """The copy with its arguments on the device: each call starts it on the current stream."""
    word = word_bytes(what)
    tables = np.stack(what[:5], axis=1) // word, np.stack(what[5:])
    entries, rows = (torch.from_numpy(table).to(device) for table in tables)
    n_rows, n_columns = len(what.src_rows), triton.cdiv(int(what.width.max()), LINE)
    given = variant(word)
    grid = (triton.cdiv(n_rows, given["BLOCK"]) * n_columns, len(what.src))
    return lambda: copy_rows[grid](entries, rows, n_rows, n_columns, **given)
