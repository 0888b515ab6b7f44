"""The drafter's KV cache on one rank, and which decode rank reads which of its heads.

The cache is a list of *entries*: K of layer 0, K of layer 1, ..., then V of each layer. In an
entry, each token has a row of the rank's heads, heads x head_bytes[entry]. K and V may differ in
width. SGLang's `QKVParallelLinear` (sglang/srt/layers/linear.py) assigns heads to ranks: with at
least as many heads as ranks, each rank holds total/tp heads; otherwise each head is on tp/total
neighbouring ranks.

SGLang's `CommonKVManager._resolve_rank_mapping` (sglang/srt/disaggregation/common/conn.py) pairs
the ranks; a decode rank finds its prefill ranks in its receiver's `bootstrap_infos`. One
attention-TP size divides the other. A decode rank reads each of its heads once, from the first of
its prefill ranks that holds it (see the picture in docs/how-it-works.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_mixkv.draft.cuda import is_over
from sglang_mixkv.draft.slot_format import SLOT_OVERHEAD
from sglang_mixkv.errors import refuse

if TYPE_CHECKING:
    from sglang_mixkv.draft.rows_gpu import GpuRows

Name = Annotated[str, msgspec.Meta(max_length=256)]
Width = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
MAX_ENTRIES = 1024
NO_HEADS = range(0)
_no_route = partial(refuse, "MIXKV-PAIR-04")


def heads_on_rank(total_heads: int, tp: int, rank: int) -> range:
    """Return the global numbers of the KV heads on `rank` of `tp`: at least one. Raises MixKVError
    unless `total_heads` divides `tp` or vice versa."""
    if total_heads <= 0 or (total_heads % tp and tp % total_heads):
        raise _no_route(
            f"a number of KV heads that divides, or is divided by, the attention-TP size {tp}",
            f"{total_heads} heads",
            "SGLang could not load the model, and no rank's heads would be known",
            "Choose a different --tp or --dp size on this side",
        )
    first = rank * total_heads // tp
    return range(first, first + max(1, total_heads // tp))


def routes(held: Sequence[range], needed: range) -> tuple[range, ...]:
    """Return the heads to read from each contacted prefill rank, in order. `held`: the heads on
    each; `needed`: the decode rank's. Numbers are global. Raises MixKVError if no rank holds a
    needed head."""
    covered, table = needed.start, []
    for heads in held:
        fresh = range(max(heads.start, covered), min(heads.stop, needed.stop))
        covered = fresh.stop if fresh else covered
        table.append(fresh or NO_HEADS)
    if sum(map(len, table)) != len(needed):
        expected = f"prefill ranks that together hold the drafter's KV heads {list(needed)}"
        consequence = "part of the drafter's cache would never be written"
        remedy = "Use attention-TP sizes where one divides the other"
        raise _no_route(expected, f"{[list(heads) for heads in held]}", consequence, remedy)
    return tuple(table)


def readers_of(prefill_tp: int, decode_tp: int) -> int:
    """Return how many decode ranks open a request on one prefill rank."""
    if min(prefill_tp, decode_tp) < 1 or (prefill_tp % decode_tp and decode_tp % prefill_tp):
        expected = "attention-TP sizes where one divides the other"
        got = f"prefill {prefill_tp}, decode {decode_tp}"
        consequence = "some decode ranks would find no complete set of prefill ranks"
        raise _no_route(expected, got, consequence, "Change --tp or --attn-dp-size on one side")
    return max(1, decode_tp // prefill_tp)


class DraftFacts(msgspec.Struct, frozen=True):
    """The facts on which both sides' drafters must agree. `head_bytes`: bytes per token and head,
    per entry. A pool's dimension order is not included: no rank starts unless it is "nhd"."""

    architecture: Name
    algorithm: Name
    total_heads: Heads
    head_bytes: Annotated[tuple[Width, ...], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]
    dtype: Name

    def bytes_per_token(self, heads: int) -> int:
        """Return the bytes of one token's rows of `heads` heads, in all entries."""
        return heads * sum(self.head_bytes)

    def tokens_in(self, slot_bytes: int, heads: int) -> int:
        return max(0, slot_bytes - SLOT_OVERHEAD) // self.bytes_per_token(heads)


class DraftLayout(msgspec.Struct, frozen=True):
    """The drafter's cache on attention-TP rank `rank` of `tp`."""

    facts: DraftFacts
    tp: Heads
    rank: Rank

    @property
    def heads(self) -> range:
        return heads_on_rank(self.facts.total_heads, self.tp, self.rank)


class Pages:
    """The pages of a chunk or a request: `pages`, page numbers of the draft pool, with `page_size`
    tokens each. `events`: objects with `query() -> bool`; until all return True, a forward may
    still write these pages. `written`: time.monotonic() when the last event was found complete.
    `error`: an event failed, so the pages must not be read."""

    def __init__(self, pages: Any, page_size: int, events: Sequence[Any] = ()) -> None:
        self._pages, self.page_size, self.events = pages, page_size, events
        self._on_device: Any = None
        self.written = time.monotonic()
        self.error: Exception | None = None

    def are_written(self) -> bool:
        """Return whether no forward writes these pages any more. Raises if this is unknown."""
        while self.events and is_over(self.events[0]):
            self.events, self.written = self.events[1:], time.monotonic()
        return not self.events

    def rows(self, offset: int, count: int) -> NDArray[np.int64]:
        """Return the row numbers of `count` tokens, from token `offset` of these pages on."""
        if self.error is not None:
            raise self.error
        tokens, size = np.arange(offset, offset + count), self.page_size
        return np.asarray(self._pages, dtype=np.int64)[tokens // size] * size + tokens % size

    def on(self, device: GpuRows) -> memoryview:
        """Return the page numbers in the form for device jobs, made once for all segments."""
        if self.error is not None:
            raise self.error
        if self._on_device is None:
            self._on_device = device.pages(self._pages)
        return self._on_device
