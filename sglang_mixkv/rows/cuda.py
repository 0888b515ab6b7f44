"""Rows on an NVIDIA GPU: one Triton kernel over raw addresses, on a stream of its own.

The kernel copies words of 16, 8, 4, 2 or 1 bytes, the widest that all addresses, strides and
widths of the call are multiples of. A program copies TILE words: of so many rows LINE bytes
each. Wider rows are cut into columns, so a size of word is one compiled variant whatever the
rows, and `warm_up` compiles them all. The kernel runs in Triton's interpreter on a CPU too,
which is how its bytes are tested without a GPU.

Too little memory is a MemoryError: the caller's request fails, the next may find some. Other
CUDA errors are raised as they are, and none counts as a copy. After an illegal address no CUDA
call of the process succeeds any more: SGLang's scheduler, which takes the pages of each request
on the GPU, ends the server with the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_mixkv.errors import refuse
from sglang_mixkv.rows.host import Buffer, RowCopy, numbers

TILE = 512  # words: four for each thread of a program
LINE = 128  # bytes of a row side by side: one cache line
IN_POOL = threading.Lock()
WORDS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
"""Words by their bytes: a type, and how many of it."""


@triton.jit(do_not_specialize=["entries", "rows", "n_rows", "n_columns"])
def copy_rows(  # type: ignore[no-untyped-def]  # noqa: ANN201
    entries,  # noqa: ANN001  int64 [E, 5]: src, dst; src, dst stride; width; all in words
    rows,  # noqa: ANN001  int64 [2, N]: src, dst row numbers
    n_rows,  # noqa: ANN001
    n_columns,  # noqa: ANN001  of LINE bytes, in the widest row
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
    parts = (what.src, what.dst, what.src_stride, what.dst_stride, what.width)
    together = int(np.bitwise_or.reduce(np.concatenate(parts)))
    return next(word for word in WORDS if together % word == 0)


def prepared(what: RowCopy, device: torch.device | str) -> Callable[[], Any]:
    """The copy with its arguments on the device: each call starts it on the current stream."""
    word = word_bytes(what)
    parts = (what.src, what.dst, what.src_stride, what.dst_stride, what.width)
    entries, rows = (
        torch.from_numpy(table).to(device, non_blocking=True)
        for table in (
            np.stack(parts, axis=1) // word,
            np.stack([numbers(what.src_rows), numbers(what.dst_rows)]),
        )
    )
    n_rows, n_columns = len(what.src_rows), triton.cdiv(int(what.width.max()), LINE)
    given = variant(word)
    grid = (triton.cdiv(n_rows, given["BLOCK"]) * n_columns, len(what.src))
    return partial(copy_rows[grid], entries, rows, n_rows, n_columns, **given)


def launch(what: RowCopy, device: torch.device | str) -> None:
    """Start the copy on the current stream of `device`."""
    prepared(what, device)()


class CudaRows:
    """Rows on one GPU. A call waits for its own stream only, never for the scheduler's. `pool`: a
    torch.cuda.MemPool to allocate in; torch lets one thread at a time do so."""

    takes_long = False

    def __init__(self, device: int, pool: Any = None) -> None:
        self._device, self._pool = torch.device("cuda", device), pool
        self._streams = threading.local()

    def warm_up(self) -> None:
        try:
            wrong = self._try_words()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            raise refuse(
                "MIXKV-START-06",
                f"a kernel that copies rows on {self._device}",
                wrong,
                "requests would fail one by one",
                "See that Triton can compile here (a C compiler, a TRITON_CACHE_DIR that can be "
                "written) and that the GPU has memory left (--mem-fraction-static)",
            )

    def _try_words(self) -> str:
        """Compile the kernel for words of every size, and copy one of each: what went wrong."""
        memory = self.allocate(16 * (1 + len(WORDS)))
        wanted = bytes(range(1, 17))
        with self._own_stream():
            memory.owner[:16] = torch.tensor(list(wanted), dtype=torch.uint8)
        for place, word in enumerate(WORDS, 1):
            size, row = np.array([word]), np.zeros(1, np.int64)
            src, dst = np.array([memory.address]), np.array([memory.address + 16 * place])
            self.copy(RowCopy(src, dst, size, size, size, row, row))
            wanted += bytes(range(1, word + 1)).ljust(16, b"\0")
        return "" if self.read(memory, len(wanted)) == wanted else "a copy with wrong bytes"

    def copy(self, what: RowCopy) -> None:
        if not len(what.src_rows) or not len(what.src):
            return
        with self._own_stream():
            launch(what, self._device)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """This thread's stream; all that was started on it is done at the end."""
        try:
            if not hasattr(self._streams, "own"):
                # Torch deals a few streams out again and again, SGLang's among them: of those with
                # priority SGLang has none.
                self._streams.own = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            with torch.cuda.device(self._device), torch.cuda.stream(self._streams.own):
                yield
            self._streams.own.synchronize()
        except RuntimeError as error:  # torch's, Triton's or CUDA's own
            if "out of memory" not in str(error):
                raise
            raise MemoryError(str(error)) from None

    @contextmanager
    def _own_pool(self) -> Iterator[None]:
        if self._pool is None:
            yield
            return
        with IN_POOL, torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def allocate(self, size: int) -> Buffer:
        """On this thread's stream: what another stream still has to do with memory that was freed
        there, and the zeroing, cannot reach bytes that are copied here later."""
        with self._own_stream(), self._own_pool():
            owner = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return Buffer(owner.data_ptr(), size, owner)

    def read(self, buffer: Buffer, size: int) -> memoryview:
        with self._own_stream():
            return memoryview(buffer.owner[:size].cpu().numpy())
