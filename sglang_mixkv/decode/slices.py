"""One component's heads as a decode rank receives them, or those of its entries with one window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from sglang_mixkv.kv.layout import Shard
from sglang_mixkv.kv.pages import window_start
from sglang_mixkv.kv.plan import Copies, component_copies
from sglang_mixkv.transport.base import Limits

Sender = tuple[int, int]  # prefill rank, stage


@dataclass(frozen=True)
class Slices:
    """`senders`: the heads (global numbers) that each sends, at least one; `prefill_tp`: their
    attention TP; `window`: how many tokens before the prompt's end come, 0: all."""

    shard: Shard
    ptrs: tuple[int, ...]
    senders: Mapping[Sender, range]
    prefill_tp: int
    window: int = 0

    def first_page(self, pages: int) -> int:
        """The first that comes of a request's pages, so many."""
        return window_start(pages, self.shard.page_size, self.window, self.shard.parts)

    @property
    def by_window(self) -> tuple[Slices, ...]:
        """The same, apart for each window that entries have."""
        return tuple(
            replace(
                self, shard=self.shard.only(entries), window=window,
                ptrs=tuple(self.ptrs[entry] for entry in entries),
            )
            for window, entries in self.shard.component.by_window.items()
        )  # fmt: skip

    @cached_property
    def are_parts(self) -> bool:
        """Whether they are parts of this rank's rows: P > D."""
        return any(heads != self.shard.heads for heads in self.senders.values())

    @cached_property
    def are_cut(self) -> bool:
        """Whether they are parts of their senders' rows: P < D."""
        return any(heads != self._sent_rows(rank) for (rank, _), heads in self.senders.items())

    def _sent_rows(self, rank: int) -> range:
        return self.shard.component.spread.on_rank(self.prefill_tp, rank)

    @cached_property
    def in_row(self) -> int:
        """Slices that make a row: the same from all stages."""
        return len({rank for rank, _ in self.senders})

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Bytes per token, per entry."""
        return self.shard.rows

    @cached_property
    def row_bytes(self) -> int:
        return sum(self.rows)

    @cached_property
    def in_pool(self) -> Mapping[Sender, Copies]:
        """Each sender's heads in every entry of this rank's pool, as a destination."""
        pairs = [(i, i) for i in range(self.shard.component.entries)]
        ptrs = list(self.ptrs)
        return {
            sender: component_copies(ptrs, self.shard, ptrs, self.shard, heads, pairs)
            for sender, heads in self.senders.items()
        }

    def worth_a_copy(self, pages: int, runs: int, limits: Limits, mode: str) -> bool:
        """Whether so many pages, in so many runs here, are better not written into the pool as
        they are: by the ranges that this takes."""
        tokens = pages * self.shard.page_size
        if self.are_parts:
            ranges = tokens * self.shard.component.entries * self.in_row
        elif self.are_cut:  # packed by their sender whatever is decided here
            ranges = runs * self.shard.component.entries
            mode = "auto" if mode == "packed" else mode
        else:
            return False  # the same rows on both sides, as the target's
        return limits.worth_packing(ranges, tokens * self.row_bytes, mode)
