"""The plan of one sender for one peer, and the byte ranges of one chunk.

A plan is computed once, when the peer registers, and holds for every chunk. It is a
table of copies, one row an entry (source entry -> destination entry):

    source row       | h0 | h1 | h2 | h3 |            src_row = 4 heads
                               \\_________ width = 1 head at src_offset = 2 heads
    destination row  | h2 | h3 |                      dst_row = 2 heads, dst_offset = 0

With `width == src_row == dst_row` a run of neighbouring pages is one range; otherwise
each token is a range of its own (the direct path), unless it is packed or sent by extent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sglang_mixkv.core.errors import MixKVError, refuse
from sglang_mixkv.core.geometry import Shard

Ints = npt.NDArray[np.int64]
Runs = tuple[Ints, Ints, Ints]


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
    def concat(parts: Iterable[Blocks]) -> Blocks:
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, np.int64)
        return Blocks(
            *(
                np.concatenate([getattr(p, name) for p in parts]) if parts else empty
                for name in ("src", "dst", "length")
            )
        )


@dataclass(frozen=True)
class Copies:
    """Entry-to-entry copies, one row each; addresses and byte counts as int64 vectors."""

    src: Ints  # base address of the source entry
    dst: Ints  # base address of the destination entry
    src_row: Ints  # bytes a token at the source
    dst_row: Ints  # bytes a token at the destination
    src_offset: Ints  # first byte of the slice in the source row
    dst_offset: Ints  # first byte of the slice in the destination row
    width: Ints  # bytes of the slice

    def select(self, mask: npt.NDArray[np.bool_]) -> Copies:
        return Copies(*(column[mask] for column in self._columns()))

    def at(self, index: int) -> Copies:
        """One of them."""
        return Copies(*(column[index : index + 1] for column in self._columns()))

    def _columns(self) -> tuple[Ints, ...]:
        return (
            self.src,
            self.dst,
            self.src_row,
            self.dst_row,
            self.src_offset,
            self.dst_offset,
            self.width,
        )

    def __len__(self) -> int:
        return len(self.src)

    @cached_property
    def parts(self) -> Parts:
        """These copies by what can be done with them."""
        fills = self.width == self.dst_row
        whole = fills & (self.width == self.src_row)
        return Parts(self.select(whole), self.select(fills & ~whole), self.select(~fills))

    @cached_property
    def bytes_per_token(self) -> int:
        return int(self.width.sum())

    @cached_property
    def slices(self) -> Ints:
        """Addresses of the first row's slice, at the source."""
        return self.src + self.src_offset

    @cached_property
    def region(self) -> Copies:
        """The same slices into a region of rows of just their width, entry after entry: `dst`
        is so many bytes a token of the region from its start. See `placed`."""
        zero = np.zeros_like(self.width)
        before = np.cumsum(self.width) - self.width
        return Copies(
            self.src, before, self.src_row, self.width, self.src_offset, zero, self.width
        )  # fmt: skip

    def placed(self, address: int, tokens: int) -> Copies:
        """Of a `region`, or of some of its entries: with a region of `tokens` at `address`."""
        return replace(self, dst=address + self.dst * tokens)

    @staticmethod
    def concat(parts: Iterable[Copies]) -> Copies:
        columns = zip(*(part._columns() for part in parts), strict=True)
        return Copies(*(np.concatenate(column) for column in columns))

    @staticmethod
    def empty() -> Copies:
        return Copies(*(np.empty(0, np.int64) for _ in range(7)))


@dataclass(frozen=True)
class Parts:
    """Copies by shape: rows that are `whole` on both sides, for which neighbouring pages form
    one range; slices that `fill` the destination's row; slices that are a part of it."""

    whole: Copies
    fill: Copies
    part: Copies


def component_copies(
    src_ptrs: list[int],
    src: Shard,
    dst_ptrs: list[int],
    dst: Shard,
    heads: range,
    pairs: list[tuple[int, int]],
) -> Copies:
    """Copies of `heads` (global numbers, held by both shards) for each (src, dst) entry pair.

    Raises MixKVError when a pair's heads differ in size.
    """
    src_head = np.array(src.head_bytes, np.int64)[[i for i, _ in pairs]]
    dst_head = np.array(dst.head_bytes, np.int64)[[j for _, j in pairs]]
    if (src_head != dst_head).any():
        raise refuse(
            f"heads of {src_head.tolist()} bytes a token, as this prefill rank has",
            f"{dst_head.tolist()} on the decode rank",
            "bytes of one head would land in another",
            "Use the same models and the same --kv-cache-dtype on both sides",
        )
    return Copies(
        src=np.array([src_ptrs[i] for i, _ in pairs], np.int64),
        dst=np.array([dst_ptrs[j] for _, j in pairs], np.int64),
        src_row=src_head * len(src.heads),
        dst_row=dst_head * len(dst.heads),
        src_offset=src_head * (heads.start - src.heads.start),
        dst_offset=dst_head * (heads.start - dst.heads.start),
        width=src_head * len(heads),
    )


@dataclass(frozen=True)
class Plan:
    """What one prefill rank writes to one decode rank. `dst_pages` bounds page numbers."""

    page_size: int
    target: Copies
    draft: Copies
    src_pages: int
    dst_pages: int

    @property
    def draft_bytes_per_page(self) -> int:
        return self.draft.bytes_per_token * self.page_size

    @property
    def target_bytes_per_page(self) -> int:
        return self.target.bytes_per_token * self.page_size

    def check_pages(self, src_pages: Ints, dst_pages: Ints) -> None:
        """Raise MixKVError unless a chunk's pages are inside both pools."""
        for name, pages, count in (
            ("source", src_pages, self.src_pages),
            ("destination", dst_pages, self.dst_pages),
        ):
            if len(pages) and not 0 <= pages.min() <= pages.max() < count:
                raise MixKVError(
                    f"{name} pages {pages.min()}..{pages.max()} of a pool of {count}; nothing of "
                    "this chunk was sent"
                )


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
    """One range a copy and run, entry after entry. Every copy must be `whole`."""
    return run_blocks(copies.src, copies.dst, copies.width * page_size, runs)


def run_blocks(src: Ints, dst: Ints, page_bytes: Ints, runs: Runs) -> Blocks:
    """One range an entry and run, entry after entry: base addresses, and bytes of a page."""
    first_src, first_dst, count = runs
    item = page_bytes[:, None]
    return Blocks(
        (src[:, None] + first_src * item).ravel(),
        (dst[:, None] + first_dst * item).ravel(),
        (count * item).ravel(),
    )


def token_blocks(copies: Copies, page_size: int, src_pages: Ints, dst_pages: Ints) -> Blocks:
    """One range a copy and token, entry after entry."""
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
