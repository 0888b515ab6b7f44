"""The plan of one sender for one peer, and the byte ranges of one chunk.

A plan is computed once, when the peer registers, and holds for every chunk. It is a
table of copies, one row an entry (source entry -> destination entry):

    source row       | h0 | h1 | h2 | h3 |            src_row = 4 heads
                               \\_________ width = 1 head at src_offset = 2 heads
    destination row  | h2 | h3 |                      dst_row = 2 heads, dst_offset = 0

With `width == src_row == dst_row` a run of neighbouring pages is one range; otherwise
each token is a range of its own (the direct path), unless it is packed first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_mixkv.core.errors import refuse
from sglang_mixkv.core.geometry import Shard

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """Byte ranges to write: equal-length vectors of addresses and lengths."""

    src: Ints
    dst: Ints
    length: Ints

    @property
    def bytes(self) -> int:
        return int(self.length.sum())

    @staticmethod
    def concat(parts: Iterable[Blocks]) -> Blocks:
        parts = list(parts)
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

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Copies of full rows, for which neighbouring pages form one range."""
        return (self.width == self.src_row) & (self.width == self.dst_row)

    @staticmethod
    def empty() -> Copies:
        return Copies(*(np.empty(0, np.int64) for _ in range(7)))


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
        return int(self.draft.width.sum()) * self.page_size

    @property
    def target_bytes_per_page(self) -> int:
        return int(self.target.width.sum()) * self.page_size


def page_runs(src_pages: Ints, dst_pages: Ints) -> tuple[Ints, Ints, Ints]:
    """Runs of pages that are neighbours on both sides: (first src, first dst, pages)."""
    if not len(src_pages):
        return src_pages, dst_pages, src_pages
    breaks = np.flatnonzero((np.diff(src_pages) != 1) | (np.diff(dst_pages) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    return src_pages[starts], dst_pages[starts], np.diff(np.append(starts, len(src_pages)))


def whole_blocks(copies: Copies, page_size: int, runs: tuple[Ints, Ints, Ints]) -> Blocks:
    """One range a copy and run, entry after entry. Every copy must be `whole`."""
    first_src, first_dst, count = runs
    item = (copies.width * page_size)[:, None]
    return Blocks(
        (copies.src[:, None] + first_src * item).ravel(),
        (copies.dst[:, None] + first_dst * item).ravel(),
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
    whole = copies.whole
    parts = []
    if whole.any():
        runs = page_runs(src_pages, dst_pages)
        parts.append(whole_blocks(copies.select(whole), page_size, runs))
    if not whole.all():
        parts.append(token_blocks(copies.select(~whole), page_size, src_pages, dst_pages))
    return Blocks.concat(parts)
