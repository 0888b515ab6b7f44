"""The byte ranges of one chunk: from pages on both sides and a plan to addresses and lengths.

Pages that are neighbours on both sides form runs. Rows that are whole on both sides need one
range per run; slices of rows need one per token, unless they are packed or sent by extent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sglang_mixkv.kv.plan import Copies, Ints

Runs = tuple[Ints, Ints, Ints]


_COLUMNS = ("src", "dst", "length")


@dataclass(frozen=True)
class Blocks:
    """Byte ranges to write: equal-length vectors of addresses and lengths."""

    src: Ints
    dst: Ints
    length: Ints

    @cached_property
    def bytes(self) -> int:
        return int(self.length.sum())

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """As Mooncake's binding takes them."""
        return self.src.tolist(), self.dst.tolist(), self.length.tolist()

    @staticmethod
    def none() -> Blocks:
        return Blocks(*(np.empty(0, np.int64) for _ in range(3)))

    @staticmethod
    def concat(parts: Iterable[Blocks]) -> Blocks:
        parts = [part for part in parts if len(part.length)]
        if len(parts) < 2:
            return parts[0] if parts else Blocks.none()
        return Blocks(*(np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS))


def row_blocks(
    src_ptrs: list[int], dst_ptrs: list[int], lens: list[int], src_row: int, dst_row: int
) -> Blocks:
    """One row of each of these buffers, whose rows have these lengths, to another row there."""
    src, dst, length = (np.array(numbers, np.int64) for numbers in (src_ptrs, dst_ptrs, lens))
    return Blocks(src + length * src_row, dst + length * dst_row, length)


def consecutive(numbers: Ints) -> range | None:
    """These numbers as a range, if each is one more than the one before. Not for none at all."""
    first, count = int(numbers[0]), len(numbers)
    if int(numbers[-1]) - first == count - 1 and bool((numbers[1:] - numbers[:-1] == 1).all()):
        return range(first, first + count)
    return None


def runs_of(*lists: Ints) -> tuple[Ints, Ints]:
    """Runs of numbers that are neighbours in all of these equal-length lists: (place of the
    first, how many)."""
    count = len(lists[0])
    if not count:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    breaks = lists[0][1:] - lists[0][:-1] != 1
    for more in lists[1:]:
        breaks |= more[1:] - more[:-1] != 1
    inner = np.flatnonzero(breaks)
    edges = np.empty(len(inner) + 2, np.int64)
    edges[0], edges[-1] = 0, count
    np.add(inner, 1, out=edges[1:-1])
    return edges[:-1], edges[1:] - edges[:-1]


def page_runs(src_pages: Ints, dst_pages: Ints) -> Runs:
    """Runs of pages that are neighbours on both sides: (first src, first dst, pages)."""
    first, count = runs_of(src_pages, dst_pages)
    return src_pages[first], dst_pages[first], count


@dataclass(frozen=True)
class PagePairs:
    """Pages at the source, and where each goes, with their runs worked out once."""

    src: Ints
    dst: Ints

    def __len__(self) -> int:
        return len(self.src)

    def cut(self, start: int, stop: int | None = None) -> PagePairs:
        return PagePairs(self.src[start:stop], self.dst[start:stop])

    def only(self, pages: range) -> PagePairs:
        """Those at these places."""
        return self if len(pages) == len(self) else self.cut(pages.start, pages.stop)

    @cached_property
    def runs(self) -> Runs:
        """Runs on both sides."""
        return page_runs(self.src, self.dst)

    @cached_property
    def dst_runs(self) -> Runs:
        """Runs at the destination, for pages that were packed in this order."""
        if len(self) and consecutive(self.dst) is not None:
            return np.zeros(1, np.int64), self.dst[:1], np.array([len(self)], np.int64)
        first, count = runs_of(self.dst)
        return first, self.dst[first], count


def whole_blocks(copies: Copies, page_size: int, runs: Runs) -> Blocks:
    """One range per copy and run, entry after entry. Every copy must be `whole`."""
    return run_blocks(copies.src, copies.dst, copies.width * page_size, runs)


def run_blocks(src: Ints, dst: Ints, page_bytes: Ints, runs: Runs) -> Blocks:
    """One range per entry and run, entry after entry: base addresses, and bytes of a page."""
    first_src, first_dst, count = runs
    item = page_bytes[:, None]
    return Blocks(
        (src[:, None] + first_src * item).ravel(),
        (dst[:, None] + first_dst * item).ravel(),
        (count * item).ravel(),
    )


def token_blocks(copies: Copies, page_size: int, src_pages: Ints, dst_pages: Ints) -> Blocks:
    """One range per copy and token, entry after entry."""
    slots = np.arange(page_size, dtype=np.int64)
    src_tokens = (src_pages[:, None] * page_size + slots).ravel()
    dst_tokens = (dst_pages[:, None] * page_size + slots).ravel()
    src = (copies.src + copies.src_offset)[:, None] + src_tokens * copies.src_row[:, None]
    dst = (copies.dst + copies.dst_offset)[:, None] + dst_tokens * copies.dst_row[:, None]
    return Blocks(src.ravel(), dst.ravel(), np.repeat(copies.width, len(src_tokens)))


def blocks(copies: Copies, page_size: int, src_pages: Ints, dst_pages: Ints) -> Blocks:
    """Byte ranges that carry `copies` for one chunk of page pairs (the direct path)."""
    by_shape, found = copies.parts, []
    if len(by_shape.whole):
        found.append(whole_blocks(by_shape.whole, page_size, page_runs(src_pages, dst_pages)))
    found += [
        token_blocks(slices, page_size, src_pages, dst_pages)
        for slices in (by_shape.fill, by_shape.part)
        if len(slices)
    ]
    return Blocks.concat(found)
