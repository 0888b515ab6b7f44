"""Copy rows between strided places: what packing and scattering are made of.

One operation serves both. Of entry e, row `src_rows[n]` at the source becomes row
`dst_rows[n]` at the destination:

    width[e] bytes   from  src[e] + src_rows[n] * src_stride[e]
                     to    dst[e] + dst_rows[n] * dst_stride[e]

`HostRows` is the reference, in numpy; `CudaRows` does the same on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sglang_mixkv.kv.plan import Ints
from sglang_mixkv.kv.ranges import consecutive

RowNumbers = Ints | range
"""Rows of a copy; consecutive ones are better given as a range."""


@dataclass(frozen=True)
class RowCopy:
    """Addresses, strides and widths in bytes, one per entry; row numbers, one per row."""

    src: Ints
    dst: Ints
    src_stride: Ints
    dst_stride: Ints
    width: Ints
    src_rows: RowNumbers
    dst_rows: RowNumbers


@dataclass
class Buffer:
    """Memory for rows: `size` bytes at `address`, as long as `owner` is kept."""

    address: int
    size: int
    owner: Any


class Rows(Protocol):
    """Where the rows are. All calls may come from several threads.

    `takes_long`: a copy takes about as long as a write of as many bytes.
    """

    @property
    def takes_long(self) -> bool: ...

    def warm_up(self) -> None:
        """Prepare, and try, what any copy can need. MixKVError if copies cannot be made here."""

    def copy(self, what: RowCopy) -> None:
        """Copy; when it returns, the bytes are there for any other engine to read.

        MemoryError where the copy itself needs memory and there is none.
        """

    def allocate(self, size: int) -> Buffer:
        """Zeroed memory for rows. MemoryError if there is none.

        Zeroed before this returns: nothing but copies writes there afterwards.
        """

    def read(self, buffer: Buffer, size: int) -> memoryview:
        """Its first `size` bytes."""


TEMPORARY = 1 << 20  # bytes, where listed rows go to listed rows


class HostRows:
    """Rows in this process's own memory."""

    takes_long = True

    def warm_up(self) -> None:
        """numpy needs no preparation."""

    def copy(self, what: RowCopy) -> None:
        count = len(what.src_rows)
        if not count:
            return
        src_rows, dst_rows = _as_slice(what.src_rows), _as_slice(what.dst_rows)
        src_count, dst_count = _end(src_rows), _end(dst_rows)
        for src, dst, src_stride, dst_stride, width in _entries(what):
            target = _view(dst, dst_count, dst_stride, width)
            source = _view(src, src_count, src_stride, width)
            apart, rest = divmod(src_stride, width)
            if isinstance(src_rows, slice):
                target[dst_rows] = source[src_rows]
            elif isinstance(dst_rows, slice) and dst_stride == width and not rest:
                # as items of a row's width, every `apart`-th of which is a row: np.take copies
                # from a contiguous source without a temporary
                items = _view(src, (src_count - 1) * apart + 1, width, width)
                np.take(items, src_rows * apart, out=target[dst_rows], mode="clip")
            else:
                self._copy_list(target, numbers(what.dst_rows), source, src_rows, width)

    @staticmethod
    def _copy_list(target: Any, dst_rows: Ints, source: Any, src_rows: Ints, width: int) -> None:
        """Through numpy's temporary, which stays small whatever the number of rows."""
        step = max(1, TEMPORARY // width)
        for first in range(0, len(src_rows), step):
            part = slice(first, first + step)
            target[dst_rows[part]] = source[src_rows[part]]

    def allocate(self, size: int) -> Buffer:
        owner = np.zeros(size, np.uint8)
        return Buffer(owner.ctypes.data, size, owner)

    def read(self, buffer: Buffer, size: int) -> memoryview:
        return memoryview(buffer.owner)[:size]


def _entries(what: RowCopy) -> Iterator[tuple[int, ...]]:
    columns = (what.src, what.dst, what.src_stride, what.dst_stride, what.width)
    return zip(*(column.tolist() for column in columns), strict=True)


def numbers(rows: RowNumbers) -> Ints:
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def _end(rows: Ints | slice) -> int:
    """The number after the last row's."""
    return int(rows.stop if isinstance(rows, slice) else rows.max() + 1)


def _as_slice(rows: RowNumbers) -> Ints | slice:
    """Consecutive rows as a slice, which numpy copies without a temporary."""
    if isinstance(rows, range):
        return slice(rows.start, rows.stop)
    found = consecutive(rows)
    return rows if found is None else slice(found.start, found.stop)


def _view(address: int, count: int, stride: int, width: int) -> np.ndarray[Any, Any]:
    """`count` rows at `address`, `stride` bytes apart, as opaque items of `width` bytes."""
    memory = (ctypes.c_char * ((count - 1) * stride + width)).from_address(address)
    return np.ndarray((count,), f"V{width}", memoryview(memory).cast("B"), 0, (stride,))
