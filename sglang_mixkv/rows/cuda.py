"""Rows on an NVIDIA GPU: one Triton kernel over raw addresses, on a stream of its own.

The kernel copies words of 8, 4, 2 or 1 bytes, the widest that all addresses, strides
and widths of the call are multiples of. It runs in Triton's interpreter on a CPU too, which
is how it is tested without a GPU.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_mixkv.rows.host import Buffer, RowCopy, numbers

BLOCK_ROWS = 32
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit
def copy_rows(  # type: ignore[no-untyped-def]  # noqa: ANN201
    word,  # noqa: ANN001  any tensor of the word's type; only its type is used
    entries,  # noqa: ANN001  int64 [5, E]: src, dst address; src, dst stride in words; width in words
    rows,  # noqa: ANN001  int64 [2, N]: src, dst row numbers
    n_entries,  # noqa: ANN001
    n_rows,  # noqa: ANN001
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= the widest row in words
):
    entry = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < n_rows
    src_row = tl.load(rows + at, mask=live, other=0)
    dst_row = tl.load(rows + n_rows + at, mask=live, other=0)
    src = tl.load(entries + entry).to(word.dtype)
    dst = tl.load(entries + n_entries + entry).to(word.dtype)
    src_stride = tl.load(entries + 2 * n_entries + entry)
    dst_stride = tl.load(entries + 3 * n_entries + entry)
    width = tl.load(entries + 4 * n_entries + entry)
    column = tl.arange(0, WIDTH)
    mask = live[:, None] & (column < width)[None, :]
    data = tl.load(src + src_row[:, None] * src_stride + column[None, :], mask=mask)
    tl.store(dst + dst_row[:, None] * dst_stride + column[None, :], data, mask=mask)


def word_bytes(what: RowCopy) -> int:
    """The widest word that everything in this copy is a multiple of."""
    parts = (what.src, what.dst, what.src_stride, what.dst_stride, what.width)
    together = int(np.bitwise_or.reduce(np.concatenate(parts)))
    return next(size for size in WORDS if together % size == 0)


def launch(what: RowCopy, device: torch.device | str) -> None:
    """Start the copy on the current stream of `device`."""
    size = word_bytes(what)
    columns = [
        what.src,
        what.dst,
        what.src_stride // size,
        what.dst_stride // size,
        what.width // size,
    ]
    entries = torch.from_numpy(np.stack(columns)).to(device, non_blocking=True)
    rows = torch.from_numpy(np.stack([numbers(what.src_rows), numbers(what.dst_rows)])).to(
        device, non_blocking=True
    )
    n_entries, n_rows = len(what.src), len(what.src_rows)
    grid = (n_entries, triton.cdiv(n_rows, BLOCK_ROWS))
    copy_rows[grid](
        torch.empty(1, dtype=WORDS[size], device=device),
        entries,
        rows,
        n_entries,
        n_rows,
        BLOCK=BLOCK_ROWS,
        WIDTH=triton.next_power_of_2(int(columns[-1].max())),
    )


class CudaRows:
    """Rows on one GPU. A call waits for its own stream only, never for the scheduler's."""

    takes_long = False

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._streams = threading.local()

    def copy(self, what: RowCopy) -> None:
        if not len(what.src_rows) or not len(what.src):
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream()):
            launch(what, self._device)
        self._stream().synchronize()

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        own: torch.cuda.Stream = self._streams.own
        return own

    def allocate(self, size: int) -> Buffer:
        try:
            owner = torch.zeros(size, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        return Buffer(owner.data_ptr(), size, owner)

    def read(self, buffer: Buffer, size: int) -> memoryview:
        return memoryview(buffer.owner[:size].cpu().numpy())
