"""What a KV cache looks like on one rank.

A *component* is one model's cache: the target's or the draft's. It is a list of *entries* (K of
layer 0, K of layer 1, ..., V of layer 0, ...; one entry per layer for MLA), each a flat region
of pages:

    region   | page 0 | page 1 | page 2 | ...          length bytes
    page     | token 0 | token 1 | ... |               item_len = page_size * row
    row      | head h0 | head h0+1 | ... |             row = local_heads * head
    (MLA: the row is one latent vector, the same on every rank; it has no heads)

Entries may differ in width (K and V need not agree), pages and heads do not.

Which heads a rank holds is SGLang's rule, `QKVParallelLinear` (sglang/srt/layers/linear.py):
with at least as many heads as ranks each rank owns total/tp of them; with fewer, each head
lives on tp/total neighbouring ranks.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_mixkv.errors import refuse
from sglang_mixkv.kv.pages import in_parts


class Kind(StrEnum):
    """How a component is spread over the attention-TP ranks."""

    MLA = "mla"  # one latent row per token, equal on every rank
    MHA = "mha"  # rows of heads, sharded; MHA, GQA and MQA alike


class Spread(msgspec.Struct, frozen=True):
    """A component's kind and the KV heads of the whole model (0 for MLA).

    The total is a number of its own: heads per rank x TP is wrong with replicas.
    """

    kind: Kind
    total_heads: int = 0

    def on_rank(self, tp: int, rank: int) -> range:
        """Global numbers of the heads on `rank` of `tp`. MLA counts as one head, head 0."""
        return range(1) if self.kind is Kind.MLA else heads_on_rank(self.total_heads, tp, rank)


def heads_on_rank(total_heads: int, tp: int, rank: int) -> range:
    """Global KV heads on `rank` of `tp`, a half-open range of at least one head.

    Raises MixKVError where neither of heads and ranks divides the other.
    """
    if total_heads <= 0 or (total_heads % tp and tp % total_heads):
        raise refuse(
            "MIXKV-PAIR-04",
            f"a number of KV heads that divides, or is divided by, the attention-TP size {tp}",
            f"{total_heads} heads",
            "SGLang could not load the model so, and no rank's heads would be known",
            "Choose another --tp or --dp size on this side",
        )
    if total_heads >= tp:
        per_rank = total_heads // tp
        return range(rank * per_rank, (rank + 1) * per_rank)
    head = rank // (tp // total_heads)
    return range(head, head + 1)


class Component(msgspec.Struct, frozen=True):
    """One model's cache on one rank. Lengths in bytes, one per entry.

    `windows`: how many tokens before the prompt's end decode reads, one per entry, 0: all. Empty:
    all of every entry.
    """

    spread: Spread
    item_lens: tuple[int, ...]
    lens: tuple[int, ...]
    windows: tuple[int, ...] = ()

    @property
    def entries(self) -> int:
        return len(self.item_lens)

    @property
    def by_window(self) -> dict[int, list[int]]:
        """Numbers of the entries with each window, in order of first appearance."""
        found: dict[int, list[int]] = {}
        for entry, window in enumerate(self.windows or (0,) * self.entries):
            found.setdefault(window, []).append(entry)
        return found


class Shard(msgspec.Struct, frozen=True):
    """A component as rank `rank` of `tp` holds it, with pages of `page_size` tokens; `parts`: so
    many of them are one of the pages that SGLang numbers."""

    component: Component
    page_size: int
    tp: int
    rank: int
    parts: int = 1

    @property
    def heads(self) -> range:
        """Global numbers of the KV heads on this rank; MLA counts as one head, head 0."""
        return self.component.spread.on_rank(self.tp, self.rank)

    @property
    def rows(self) -> tuple[int, ...]:
        """Bytes per token, per entry."""
        return tuple(length // self.page_size for length in self.component.item_lens)

    @property
    def head_bytes(self) -> tuple[int, ...]:
        """Bytes per token and head, per entry. For MLA the whole row."""
        return tuple(row // len(self.heads) for row in self.rows)

    @property
    def pages(self) -> int:
        """Pages that every entry has room for."""
        pairs = zip(self.component.lens, self.component.item_lens, strict=True)
        return min((length // item for length, item in pairs), default=0)

    def split(self, parts: int) -> Shard:
        """The same memory, so many pages in the place of each. Of a shard that was checked."""
        whole = self.component
        items = tuple(length // parts for length in whole.item_lens)
        return msgspec.structs.replace(
            self,
            component=msgspec.structs.replace(whole, item_lens=items),
            page_size=self.page_size // parts,
            parts=self.parts * parts,
        )

    def numbered(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Pages of SGLang's, by the numbers that they have here."""
        return in_parts(pages, self.parts)

    def only(self, entries: list[int]) -> Shard:
        """The same with these of its entries."""
        whole = self.component
        items, lens = ([of[i] for i in entries] for of in (whole.item_lens, whole.lens))
        part = Component(whole.spread, tuple(items), tuple(lens))
        return msgspec.structs.replace(self, component=part)

    def check(self, name: str) -> None:
        """Raise MixKVError unless every entry is a whole number of pages, rows and heads."""
        component = self.component
        if len(component.lens) != component.entries:
            raise refuse(
                "MIXKV-START-05",
                f"one region length for each of the {component.entries} {name} entries",
                f"{len(component.lens)}",
                "destinations could not be bounds-checked",
                "Start both sides with the same sglang-mixkv version",
            )
        step = self.page_size * len(self.heads)
        for index, item_len in enumerate(component.item_lens):
            if item_len <= 0 or item_len % step:
                raise refuse(
                    "MIXKV-START-05",
                    f"{name} entry {index} to be pages of {self.page_size} tokens x "
                    f"{len(self.heads)} heads",
                    f"{item_len} bytes per page",
                    "heads would be cut at wrong offsets",
                    "Use a KV pool in NHD layout and a drafter whose configuration names its "
                    "real number of KV heads",
                )


class Caches(msgspec.Struct, frozen=True):
    """This rank's target and draft, with the addresses of their entries."""

    target: Shard
    target_ptrs: tuple[int, ...]
    draft: Shard | None = None
    draft_ptrs: tuple[int, ...] = ()

    @property
    def pages(self) -> int:
        """Pages that both have room for."""
        return min(shard.pages for shard in (self.target, self.draft) if shard is not None)
