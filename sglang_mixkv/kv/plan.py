"""The plan of one sender for one peer: which slices of which entries go where.

A plan is computed once, when the peer registers, and holds for every chunk. It is a
table of copies, one row per entry (source entry -> destination entry):

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
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang_mixkv.errors import MixKVError, refuse
from sglang_mixkv.kv.pages import in_parts, window_start

if TYPE_CHECKING:  # rows/ and transport/ then need numpy alone, as on a machine with little else
    from sglang_mixkv.kv.layout import Shard

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Copies:
    """Entry-to-entry copies, one row each; addresses and byte counts as int64 vectors."""

    src: Ints  # base address of the source entry
    dst: Ints  # base address of the destination entry
    src_row: Ints  # bytes per token at the source
    dst_row: Ints  # bytes per token at the destination
    src_offset: Ints  # first byte of the slice in the source row
    dst_offset: Ints  # first byte of the slice in the destination row
    width: Ints  # bytes of the slice

    def select(self, mask: npt.NDArray[np.bool_]) -> Copies:
        return Copies(*(column[mask] for column in self._columns()))

    def joined(self, tokens: int) -> Copies:
        """Of rows that are whole on both sides: so many of them as one."""
        rows = (self.src_row, self.dst_row, self.src_offset, self.dst_offset, self.width)
        return Copies(self.src, self.dst, *(column * tokens for column in rows))

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
        is so many bytes per token of the region from its start. See `placed`."""
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
            "MIXKV-PAIR-03",
            f"heads of {src_head.tolist()} bytes per token, as this prefill rank has",
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
class Reach:
    """Copies of which decode reads `window` tokens before the prompt's end; 0: all."""

    window: int
    copies: Copies


@dataclass(frozen=True)
class Plan:
    """What one prefill rank writes to one decode rank. `draft`: one for each window that entries
    have; `dst_pages` bounds page numbers.

    With decode context parallelism the drafter is in larger pages than the target. `parts`: on
    decode alone, a page there is so many here. `joined`: on both sides, a row of `draft` is the
    KV of so many tokens (Copies.joined).
    """

    page_size: int
    target: Copies
    draft: tuple[Reach, ...]
    src_pages: int
    dst_pages: int
    parts: int = 1
    joined: int = 1

    @property
    def page_tokens(self) -> int:
        """Tokens of a request in each of its pages."""
        return self.page_size * self.joined

    def room_pages(self, numbers: Ints) -> Ints:
        """A request's destination pages, from the numbers that decode has for them."""
        return in_parts(numbers, self.parts)

    def firsts(self, pages: int) -> tuple[int, ...]:
        """The first of a request's pages that each of `draft` sends."""
        size, parts = self.page_tokens, self.parts
        return tuple(window_start(pages, size, reach.window, parts) for reach in self.draft)

    def draft_bytes(self, pages: Iterable[int]) -> int:
        """Bytes of so many pages of each of `draft`."""
        counted = zip(self.draft, pages, strict=True)
        return sum(reach.copies.bytes_per_token * n for reach, n in counted) * self.page_size

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
                    "MIXKV-SEND-01",
                    f"{name} pages {pages.min()}..{pages.max()} of a pool of {count}; nothing of "
                    "this chunk was sent",
                )


def into_region(copies: Copies, address: int, tokens: int) -> Copies:
    """The same slices, with a region of rows of just their width as the destination.

    Layout of a region: entry after entry, `tokens` rows each.
    """
    return copies.region.placed(address, tokens)


def from_region(copies: Copies, address: int, tokens: int) -> Copies:
    """The same slices, with such a region as the source."""
    region = into_region(copies, address, tokens)
    return Copies(
        region.dst, copies.dst, copies.width, copies.dst_row, region.dst_offset,
        copies.dst_offset, copies.width,
    )  # fmt: skip


Pairs = list[tuple[int, int]]


def positional_pairs(n_src: int, n_dst: int, start_layer: int, *, halves: bool) -> Pairs:
    """Pair entries by position, as stock does for pools without layer ids.

    A prefill PP stage holds layers start_layer.. of the decode side's. `halves`: entries are
    all K, then all V (sglang: common/conn.py get_mha_kv_ptrs_with_pp, get_mla_kv_ptrs_with_pp).
    """
    if n_src == n_dst:
        return [(i, i) for i in range(n_src)]
    groups = 2 if halves else 1
    src_layers, dst_layers = n_src // groups, n_dst // groups
    if start_layer + src_layers > dst_layers:
        raise refuse(
            "MIXKV-PAIR-04",
            f"a decode rank with layers {start_layer}..{start_layer + src_layers - 1}",
            f"{dst_layers} layers",
            "this stage's KV would have no destination",
            "Use a decode --pp-size of 1, or the prefill's",
        )
    return [
        (group * src_layers + layer, group * dst_layers + start_layer + layer)
        for group in range(groups)
        for layer in range(src_layers)
    ]
