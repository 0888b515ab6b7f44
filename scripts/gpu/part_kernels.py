"""The copy kernel against numpy: words of every size, widths, strides, row numbers, all random.

On a GPU every width up to four cache lines and some long ones, per size of word; on the CPU a few
of each, since Triton's interpreter is slow. Source and destination are noise, and every byte of
the destination is compared, so what was not to be written shows too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import devices
import numpy as np
from parts import Found, Record, Wrong

from sglang_mixkv.kv.plan import Ints
from sglang_mixkv.rows import cuda
from sglang_mixkv.rows.host import HostRows, RowCopy, RowNumbers, numbers

LONG = (656, 1024, 1152, 2048, 4096, 8192, 65536)  # as scripts/bench/kernels.py has them, and more
LINES = 4  # every width up to so many cache lines
FAR = 1 << 31  # row numbers that 32 bits do not hold
ALIGNED = 256  # of an entry, before it is moved by one word


def widths(word: int, *, every: bool) -> list[int]:
    """Of slices that such words divide."""
    line = cuda.LINE
    if not every:
        return [word, line - word, line, line + word, 2 * line + word]
    long = [width for width in LONG if width % word == 0]
    return [*range(word, LINES * line + 1, word), *long]


@dataclass(frozen=True)
class Case:
    """A copy of entries of these widths, and where it lies in a source and a destination of so
    many bytes; rows of `src` and `dst` as long as they are used."""

    word: int
    width: Ints
    src_stride: Ints
    dst_stride: Ints
    src: Ints
    dst: Ints
    src_rows: RowNumbers
    dst_rows: RowNumbers
    src_size: int
    dst_size: int
    far: bool

    def at(self, src: int, dst: int) -> RowCopy:
        """With source and destination at these addresses."""
        return RowCopy(
            src + self.src, dst + self.dst, self.src_stride, self.dst_stride, self.width,
            self.src_rows, self.dst_rows,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"word {self.word}, widths {self.width.tolist()}, strides {self.src_stride.tolist()} "
            f"-> {self.dst_stride.tolist()}, {len(self.src_rows)} rows"
        )


def made(rng: np.random.Generator, word: int, width: int) -> Case:
    """A random case with an entry of that width, whose widest word is this one."""
    many = int(rng.integers(1, 4))
    wide = np.array([width, *(word * rng.integers(1, 40, many - 1))], np.int64)
    src_stride, dst_stride = (wide + word * rng.integers(0, 9, many) for _ in range(2))
    block = cuda.variant(word)["BLOCK"]
    count = int(rng.choice([1, block - 1, block, block + 1, 3 * block - 1]))
    rows = 2 * count + 3
    src, src_size = _places(src_stride * rows, word)
    dst, dst_size = _places(dst_stride * rows, word)
    src_rows, dst_rows = (_rows(rng, rows, count, repeat) for repeat in (True, False))
    return Case(
        word, wide, src_stride, dst_stride, src, dst, src_rows, dst_rows, src_size, dst_size,
        far=bool(rng.integers(2)),
    )  # fmt: skip


def _places(sizes: Ints, word: int) -> tuple[Ints, int]:
    """Where entries begin, each a word behind what is aligned for wider ones; the end."""
    whole = -(-(sizes + word) // ALIGNED) * ALIGNED
    return np.cumsum(whole) - whole + word, int(whole.sum())


def _rows(rng: np.random.Generator, rows: int, count: int, repeat: bool) -> RowNumbers:
    """A run, or numbers in any order; of a source some more than once."""
    if rng.integers(3) == 0:
        first = int(rng.integers(rows - count + 1))
        return range(first, first + count)
    return rng.choice(rows, count, replace=repeat).astype(np.int64)


def far(what: RowCopy) -> RowCopy:
    """The same copy with row numbers, and so distances, that 32 bits do not hold."""
    return replace(
        what,
        src=what.src - FAR * what.src_stride,
        dst=what.dst - FAR * what.dst_stride,
        src_rows=numbers(what.src_rows) + FAR,
        dst_rows=numbers(what.dst_rows) + FAR,
    )


def is_right(device: devices.Device, case: Case, rng: np.random.Generator) -> bool:
    """Whether the device's destination is numpy's, byte by byte."""
    source, wanted = (rng.integers(0, 256, n, np.uint8) for n in (case.src_size, case.dst_size))
    src, dst = (device.rows.allocate(len(data)) for data in (source, wanted))
    device.put(src, source)
    device.put(dst, wanted)
    what = case.at(src.address, dst.address)
    if cuda.word_bytes(what) != case.word:
        raise Wrong(f"a case in words of {cuda.word_bytes(what)} instead of {case.word}: {case}")
    device.rows.copy(far(what) if case.far else what)
    HostRows().copy(case.at(source.ctypes.data, wanted.ctypes.data))
    return bool(np.array_equal(device.get(dst), wanted))


def cases(rng: np.random.Generator, options: argparse.Namespace) -> Iterator[Case]:
    every = options.device == "cuda"
    for _ in range(options.rounds):
        for word in cuda.WORDS:
            yield from (made(rng, word, width) for width in widths(word, every=every))


def run(options: argparse.Namespace) -> Found:
    device, rng = devices.here(options, devices.Interpreted), np.random.default_rng(options.seed)
    device.rows.warm_up()  # what a server with a GPU does not start without
    records: dict[int, Record] = {
        word: {"word": word, "cases": 0, "bytes": 0, "wrong": 0} for word in cuda.WORDS
    }
    wrong: list[str] = []
    for case in cases(rng, options):
        record, right = records[case.word], is_right(device, case, rng)
        record["cases"] += 1
        record["bytes"] += int(case.width.sum()) * len(case.src_rows)
        record["wrong"] += not right
        wrong += [] if right else [str(case)]
    figures = list(records.values())
    tried = sum(record["cases"] for record in figures)
    found = Found(f"{tried:,} copies, every byte as numpy's", figures, figures)
    if wrong:
        first = "; ".join(wrong[:3])
        raise Wrong(f"{len(wrong)} of {tried:,} copies with wrong bytes, the first: {first}", found)
    return found
