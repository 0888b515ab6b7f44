"""Copy rows between strided places: what packing and scattering are made of.

One operation serves both. Of entry e, row `src_rows[n]` at the source becomes row
`dst_rows[n]` at the destination:

    width[e] bytes   from  src[e] + src_rows[n] * src_stride[e]
                     to    dst[e] + dst_rows[n] * dst_stride[e]

`HostRows` is the reference, in numpy; `CudaRows` does the same on a GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sglang_mixkv.core.plan import Ints


@dataclass(frozen=True)
class RowCopy:
    """Addresses, strides and widths in bytes, one an entry; row numbers, one a row."""

    src: Ints
    dst: Ints
    src_stride: Ints
    dst_stride: Ints
    width: Ints
    src_rows: Ints
    dst_rows: Ints


class Rows(Protocol):
    """Where the rows are. Both calls may come from several threads."""

    def copy(self, what: RowCopy) -> None:
        """Copy; when it returns, the bytes are there for any other engine to read."""

    def allocate(self, size: int) -> tuple[int, Any]:
        """Zeroed memory for rows: its address, and what owns it. MemoryError if none."""

    def read(self, owner: Any, size: int) -> memoryview:
        """The first `size` bytes of what `allocate` gave."""


class HostRows:
    """Rows in this process's own memory."""

    def copy(self, what: RowCopy) -> None:
        for entry in range(len(what.src)):
            width = int(what.width[entry])
            source = _view(what.src[entry], what.src_rows, what.src_stride[entry], width)
            target = _view(what.dst[entry], what.dst_rows, what.dst_stride[entry], width)
            if _is_range(what.dst_rows):
                first = int(what.dst_rows[0])
                out = target[first : first + len(what.dst_rows)]
                if out.flags.c_contiguous:
                    np.take(source, what.src_rows, out=out, mode="clip")
                    continue
            target[what.dst_rows] = source[what.src_rows]

    def allocate(self, size: int) -> tuple[int, Any]:
        owner = np.zeros(size, np.uint8)
        return owner.ctypes.data, owner

    def read(self, owner: Any, size: int) -> memoryview:
        return memoryview(owner)[:size]


def _is_range(rows: Ints) -> bool:
    return bool(len(rows)) and bool((np.diff(rows) == 1).all())


def _view(address: int, rows: Ints, stride: int, width: int) -> np.ndarray[Any, Any]:
    """The strided rows at `address` as opaque items of `width` bytes, up to the last used."""
    count, stride = (int(rows.max()) + 1 if len(rows) else 0), int(stride)
    size = max(0, (count - 1) * stride + width) if count else 0
    memory = (ctypes.c_char * size).from_address(int(address))
    return np.ndarray((count,), f"V{width}", memoryview(memory).cast("B"), 0, (stride,))
