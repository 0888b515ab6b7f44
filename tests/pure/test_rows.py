"""Rows in host memory, byte by byte, against plain loops. On a GPU: test_cuda.py."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig.scene import CANARY, ints, noise

from sglang_mixkv.rows.host import HostRows, RowCopy


@dataclass
class RowCase:
    """Entries of (width, source stride, destination stride), and row numbers."""

    entries: list[tuple[int, int, int]]
    src_rows: list[int]
    dst_rows: list[int]
    rows: int = 16
    sources: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, (_, src_stride, dst_stride) in enumerate(self.entries):
            self.sources.append(noise(self.rows * src_stride, seed=number))
            self.targets.append(np.full(self.rows * dst_stride, CANARY, np.uint8))

    def what(self) -> RowCopy:
        columns = np.array(self.entries, np.int64).T
        return RowCopy(
            ints(*(s.ctypes.data for s in self.sources)),
            ints(*(t.ctypes.data for t in self.targets)),
            *(columns[1], columns[2], columns[0]),
            *(ints(*self.src_rows), ints(*self.dst_rows)),
        )

    def expected(self) -> list[bytes]:
        wanted = []
        for (width, src_stride, dst_stride), source, target in zip(
            self.entries, self.sources, self.targets, strict=True
        ):
            out = bytearray(target.tobytes())
            for src, dst in zip(self.src_rows, self.dst_rows, strict=True):
                row = source[src * src_stride : src * src_stride + width]
                out[dst * dst_stride : dst * dst_stride + width] = row.tobytes()
            wanted.append(bytes(out))
        return wanted


widths = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 40])


@st.composite
def row_cases(draw: st.DrawFn) -> RowCase:
    gaps = st.sampled_from([0, 1, 4, 8, 24])
    entries = [
        (width, width + draw(gaps), width + draw(gaps))
        for width in draw(st.lists(widths, min_size=1, max_size=3))
    ]
    count = draw(st.integers(0, 16))
    src_rows = draw(st.lists(st.integers(0, 15), min_size=count, max_size=count))
    first = draw(st.integers(0, 16 - count))
    in_order = list(range(first, first + count))
    dst_rows = draw(st.just(in_order) | st.permutations(range(16)).map(lambda p: p[:count]))
    return RowCase(entries, src_rows, dst_rows)


@given(row_cases())
def test_host_rows_copy_as_a_plain_loop_does(case: RowCase) -> None:
    wanted = case.expected()
    HostRows().copy(case.what())
    assert [target.tobytes() for target in case.targets] == wanted


@pytest.mark.parametrize("rows", [[0, 2, 1, 3], [3, 4, 5], [5, 4], [2]])
def test_rows_in_order_are_told_from_others(rows: list[int]) -> None:
    """A list that begins and ends as a run does is no run."""
    for src, dst in ((rows, sorted(rows)), (sorted(rows), rows)):
        case = RowCase([(8, 8, 12), (8, 12, 8), (8, 8, 8)], src, dst)
        wanted = case.expected()
        HostRows().copy(case.what())
        assert [target.tobytes() for target in case.targets] == wanted


def test_listed_rows_to_listed_rows_need_little_memory_beside_them() -> None:
    """16 MiB of rows, as `cold` clears a long request's: through a temporary of 1 MiB."""
    count, width = 1 << 14, 1 << 10
    rows = np.random.default_rng(1).permutation(count)
    source, target = noise(count * width), np.zeros(count * width, np.uint8)
    one = np.ones(1, np.int64)
    what = RowCopy(
        one * source.ctypes.data, one * target.ctypes.data, one * width, one * width, one * width,
        rows, rows[::-1].copy(),
    )  # fmt: skip
    tracemalloc.start()
    HostRows().copy(what)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
    assert (target.reshape(count, width)[rows[::-1]] == source.reshape(count, width)[rows]).all()


def test_host_rows_allocate_what_was_asked_for() -> None:
    memory = HostRows().allocate(4096)
    assert (memory.size, memory.address) == (4096, memory.owner.ctypes.data)
    memory.owner[:3] = 1, 2, 3
    assert bytes(HostRows().read(memory, 4)) == bytes([1, 2, 3, 0])
