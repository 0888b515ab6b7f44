"""What is transferred: cases, their places in memory, the plan of each sender, the truth.

    gather   P > D   senders x | slice |  ->  one row of all slices at the receiver
    scatter  P < D   | other | slice |    ->  a row of just the slice at the receiver

A drafter of one layer: entries K and V. The target, where there is one, is MLA rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from sglang_mixkv.kv.layout import Component, Kind, Shard, Spread
from sglang_mixkv.kv.plan import Copies, Ints, Plan, Reach, component_copies
from sglang_mixkv.kv.routes import Route, Topology, routes

HEAD_BYTES = 256  # 128 x bf16
MLA_ROW = 1152  # (512 + 64) x bf16
ENTRIES = 2  # K and V
CANARY = 0xA5

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Case:
    """`heads`: KV heads of one sender's slice. `requests`: so many of `tokens` tokens each."""

    direction: str
    senders: int
    tokens: int
    page_size: int
    layout: str
    heads: int
    mla_layers: int = 0
    requests: int = 1

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    @property
    def width(self) -> int:
        """Bytes of one token's slice in one entry."""
        return self.heads * HEAD_BYTES

    @property
    def src_row(self) -> int:
        return self.width * (1 if self.direction == "gather" else 2)

    @property
    def dst_row(self) -> int:
        return self.width * self.senders

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return self.tokens // self.page_size

    @property
    def pool_pages(self) -> int:
        return self.pages * self.requests * 5 // 4 + 1

    @property
    def pool_tokens(self) -> int:
        return self.pool_pages * self.page_size

    @property
    def draft_bytes(self) -> int:
        """Bytes of all slices of one request."""
        return ENTRIES * self.tokens * self.width * self.senders

    @property
    def bytes(self) -> int:
        """Bytes of one request, target included."""
        return self.draft_bytes + self.mla_layers * MLA_ROW * self.tokens

    @property
    def run_bytes(self) -> int:
        """Length of a range that a sender packs into the receiver's pool, at most."""
        pages = self.pages if self.layout == "contiguous" else 1
        return pages * self.page_size * self.width

    @property
    def topology(self) -> Topology:
        tp = (self.senders, 1) if self.direction == "gather" else (1, 2)
        return Topology(*tp, target=Spread(Kind.MLA), draft=self.spread)

    @property
    def spread(self) -> Spread:
        return Spread(Kind.MHA, self.heads * (self.senders if self.direction == "gather" else 2))

    @property
    def decode_rank(self) -> int:
        """The last decode rank: a scattered slice then does not start its row."""
        return self.topology.decode_tp - 1

    @property
    def table(self) -> tuple[Route, ...]:
        return routes(self.topology, self.decode_rank)


@cache
def page_tables(case: Case, side: str) -> tuple[Ints, ...]:
    """Pages of each request in this side's pool."""
    total = case.pages * case.requests
    if case.layout == "contiguous":
        numbers = np.arange(total, dtype=np.int64) + case.pool_pages - total
    else:
        rng = np.random.default_rng([case.tokens, side == "decode"])
        numbers = rng.permutation(case.pool_pages)[:total].astype(np.int64)
    return tuple(np.split(numbers, case.requests))


# ---------------------------------------------------------------- places


def _places(case: Case, row: int, first: int) -> tuple[list[int], int]:
    """Offsets of the drafter's entries from `first` on, and the end."""
    size = case.pool_tokens * row
    return [first + i * size for i in range(ENTRIES)], first + ENTRIES * size


def mla_places(case: Case) -> tuple[list[int], int]:
    """Offsets of the target's entries, the same on both sides, and their end."""
    size = case.pool_tokens * MLA_ROW
    return [i * size for i in range(case.mla_layers)], case.mla_layers * size


def src_places(case: Case, sender: int) -> list[int]:
    """Offsets of a sender's draft entries: target first, then sender after sender."""
    _, end = mla_places(case)
    return _places(case, case.src_row, end + sender * ENTRIES * case.pool_tokens * case.src_row)[0]


def dst_places(case: Case) -> list[int]:
    return _places(case, case.dst_row, mla_places(case)[1])[0]


def src_size(case: Case) -> int:
    """Bytes at the sender's side."""
    return mla_places(case)[1] + case.senders * ENTRIES * case.pool_tokens * case.src_row


def dst_size(case: Case) -> int:
    return mla_places(case)[1] + ENTRIES * case.pool_tokens * case.dst_row


# ---------------------------------------------------------------- plans


def _shard(case: Case, spread: Spread, row: int, entries: int, tp: int, rank: int) -> Shard:
    items = (row * case.page_size,) * entries
    lengths = tuple(item * case.pool_pages for item in items)
    return Shard(Component(spread, items, lengths), case.page_size, tp, rank)


def dst_draft(case: Case) -> Shard:
    """The drafter on the decode rank."""
    tp, rank = case.topology.decode_tp, case.decode_rank
    return _shard(case, case.spread, case.dst_row, ENTRIES, tp, rank)


def plan(case: Case, sender: int, truth: int, pool: int) -> Plan:
    """What this sender writes, of entries at `truth` to entries at `pool` (addresses)."""
    tp = case.topology.prefill_tp
    route = case.table[sender]
    pairs = [(i, i) for i in range(ENTRIES)]
    draft = component_copies(
        [truth + place for place in src_places(case, sender)],
        _shard(case, case.spread, case.src_row, ENTRIES, tp, route.prefill_rank),
        [pool + place for place in dst_places(case)],
        dst_draft(case),
        route.draft_heads,
        pairs,
    )
    target = _target(case, truth, pool) if route.is_send_target else Copies.empty()
    return Plan(case.page_size, target, (Reach(0, draft),), case.pool_pages, case.pool_pages)


def _target(case: Case, truth: int, pool: int) -> Copies:
    if not case.mla_layers:
        return Copies.empty()
    part = _shard(case, Spread(Kind.MLA), MLA_ROW, case.mla_layers, 1, 0)
    places, _ = mla_places(case)
    src, dst = [truth + place for place in places], [pool + place for place in places]
    pairs = [(i, i) for i in range(case.mla_layers)]
    return component_copies(src, part, dst, part, range(1), pairs)


# ---------------------------------------------------------------- truth


def make_truth(size: int) -> Bytes:
    """Random bytes: every sender's pools, known to the receiver too."""
    rng = np.random.default_rng(7)
    return rng.integers(0, 2**63, -(-size // 8), np.int64).view(np.uint8)[:size]


def wrong_bytes(case: Case, truth: Bytes, pool: Bytes) -> int:
    """Bytes of the receiver's pool that are not as they should be, untouched pages included."""
    wrong = sum(_differ(*pair) for pair in _slices(case, truth, pool))
    free = np.setdiff1d(np.arange(case.pool_pages), np.concatenate(page_tables(case, "decode")))
    for rows in _pool_entries(case, pool):
        wrong += int((rows[free] != CANARY).sum())
    return wrong


def _differ(want: Bytes, got: Bytes) -> int:
    return 0 if np.array_equal(want, got) else int((want != got).sum())


def _rows(case: Case, memory: Bytes, place: int, row: int) -> Bytes:
    part = memory[place : place + case.pool_tokens * row]
    return part.reshape(case.pool_pages, case.page_size, row)


def _pool_entries(case: Case, pool: Bytes) -> Iterator[Bytes]:
    for place in mla_places(case)[0]:
        yield _rows(case, pool, place, MLA_ROW)
    for place in dst_places(case):
        yield _rows(case, pool, place, case.dst_row)


def _slices(case: Case, truth: Bytes, pool: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """What was to be sent, and what arrived, entry by entry."""
    src = np.concatenate(page_tables(case, "prefill"))
    dst = np.concatenate(page_tables(case, "decode"))
    for place in mla_places(case)[0]:
        want, got = (_rows(case, memory, place, MLA_ROW) for memory in (truth, pool))
        yield want[src], got[dst]
    for sender in range(case.senders):
        first_src = case.src_row - case.width
        first_dst = sender * case.width
        for here, there in zip(src_places(case, sender), dst_places(case), strict=True):
            want = _rows(case, truth, here, case.src_row)[:, :, first_src:]
            got = _rows(case, pool, there, case.dst_row)
            yield want[src], got[dst][:, :, first_dst : first_dst + case.width]
