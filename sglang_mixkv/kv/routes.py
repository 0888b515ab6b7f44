r"""Who sends what to whom: one pure function of the two topologies.

Both sides call `routes` and get the same table; the decode side tells each
prefill rank its row when it registers, and a prefill rank that computed another
row refuses.

Rules, per prefill pipeline stage and decode rank:

* MLA (target or draft): every contacted rank holds the same rows, the first sends.
* MHA: each head the decode rank needs is sent once, by the first contacted rank
  that holds it. Replicated heads are never sent twice.
* aux data (first token, the drafter's hidden state, ...): the first contacted rank of the
  last contacted stage alone. That stage holds the drafter; an earlier stage's row, arriving
  later, could undo it.
* state of hybrid models: as stock. A pure MLA target's state is replicated and comes
  from the first rank; hybrid MLA and MHA targets have TP-sharded state, which every
  contacted rank sends.
* a rank with none of these is a dummy: it is contacted (SGLang's polling needs
  that), but sends nothing and answers nothing.

The drafter lives on the last prefill stage.

Which ranks talk to each other is SGLang's rule, `CommonKVManager._resolve_rank_mapping`
(sglang/srt/disaggregation/common/conn.py). One TP size divides the other.

    prefill TP 4       0   1   2   3          prefill TP 2      0       1
                        \ /     \ /                            / \     / \
    decode  TP 2         0       1            decode  TP 4     0   1   2   3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from sglang_mixkv.errors import refuse
from sglang_mixkv.kv.layout import Kind, Spread

NO_HEADS = range(0)


def check_pairing(prefill_tp: int, decode_tp: int) -> None:
    """Raise MixKVError unless one attention-TP size divides the other."""
    if min(prefill_tp, decode_tp) < 1 or (prefill_tp % decode_tp and decode_tp % prefill_tp):
        raise refuse(
            "MIXKV-PAIR-04",
            "attention-TP sizes of which one divides the other",
            f"prefill {prefill_tp}, decode {decode_tp}",
            "some decode ranks would find no whole set of prefill ranks",
            "Change --tp or --attn-dp-size on one side",
        )


def check_dcp(prefill: tuple[int, int], decode: tuple[int, int], target: Spread) -> None:
    """Raise MixKVError for (attention TP, DCP) sizes that SGLang does not serve either
    (CommonKVManager.requires_dcp_relayout)."""
    (prefill_tp, ours), (decode_tp, theirs) = prefill, decode
    if ours == theirs == 1:
        return
    if target.kind is not Kind.MLA:
        raise refuse(
            "MIXKV-PAIR-04",
            "an MLA target with --dcp-size above 1",
            f"one with {target.total_heads} KV heads",
            "SGLang cuts no other target by tokens",
            "Use --dcp-size 1",
        )
    if ours not in (1, theirs):
        raise refuse(
            "MIXKV-PAIR-04",
            f"--dcp-size 1 on prefill, or decode's {theirs}",
            f"{ours}",
            "each decode rank would get other ranks' tokens",
            "Change --dcp-size on one side",
        )
    if ours == theirs and prefill_tp != decode_tp:
        raise refuse(
            "MIXKV-PAIR-04",
            f"equal attention-TP sizes with --dcp-size {ours} on both sides",
            f"prefill {prefill_tp}, decode {decode_tp}",
            "ranks that hold other tokens would be paired",
            "Use --dcp-size 1 on prefill",
        )


def contacted_ranks(prefill_tp: int, decode_tp: int, decode_rank: int) -> range:
    """Attention-TP ranks of the prefill side that a decode rank registers with."""
    check_pairing(prefill_tp, decode_tp)
    if prefill_tp >= decode_tp:
        fan_in = prefill_tp // decode_tp
        return range(decode_rank * fan_in, (decode_rank + 1) * fan_in)
    prefill_rank = decode_rank // (decode_tp // prefill_tp)
    return range(prefill_rank, prefill_rank + 1)


def overlap(left: range, right: range) -> range:
    """Common part of two half-open ranges of step 1; empty when they do not meet."""
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))


class Topology(msgspec.Struct, frozen=True):
    """All that decides the routes between one prefill and one decode server.

    `stages` are the prefill pipeline stages that a decode rank contacts,
    `last_stage` the one that holds the drafter. `sharded_state`: the target has
    state (mamba, KDA, SWA of MHA targets) that is cut by TP rank.
    """

    prefill_tp: int
    decode_tp: int
    target: Spread
    draft: Spread | None
    stages: tuple[int, ...] = (0,)
    last_stage: int = 0
    sharded_state: bool = False


class Route(msgspec.Struct, frozen=True):
    """What one prefill rank sends to one decode rank. Head ranges are global numbers."""

    prefill_rank: int
    stage: int
    target_heads: range
    draft_heads: range
    sends_aux: bool
    sends_state: bool

    @property
    def is_send_target(self) -> bool:
        return len(self.target_heads) > 0

    @property
    def is_send_draft(self) -> bool:
        return len(self.draft_heads) > 0

    @property
    def is_dummy(self) -> bool:
        return not (self.is_send_target or self.is_send_draft or self.sends_state or self.sends_aux)


def _assign(spread: Spread, topology: Topology, decode_rank: int) -> Iterator[range]:
    """For each contacted prefill rank in order, the heads that it is first to hold."""
    needed = spread.on_rank(topology.decode_tp, decode_rank)
    covered = needed.start
    for rank in contacted_ranks(topology.prefill_tp, topology.decode_tp, decode_rank):
        held = overlap(spread.on_rank(topology.prefill_tp, rank), needed)
        fresh = overlap(held, range(covered, needed.stop))
        covered = max(covered, fresh.stop) if fresh else covered
        yield fresh if fresh else NO_HEADS
    if covered != needed.stop:
        raise refuse(
            "MIXKV-PAIR-04",
            f"prefill ranks that together hold KV heads {needed.start}..{needed.stop - 1}",
            f"heads up to {covered - 1} only",
            "part of the decode rank's cache would never be written",
            "This pair of TP sizes and heads is not supported",
        )


@lru_cache(maxsize=4096)
def routes(topology: Topology, decode_rank: int) -> tuple[Route, ...]:
    """The table of one decode rank (attention-TP number), dummies included.

    Raises MixKVError for sizes that do not divide each other.
    """
    ranks = contacted_ranks(topology.prefill_tp, topology.decode_tp, decode_rank)
    target = tuple(_assign(topology.target, topology, decode_rank))
    draft = (
        tuple(_assign(topology.draft, topology, decode_rank))
        if topology.draft
        else (NO_HEADS,) * len(ranks)
    )
    return tuple(
        Route(
            prefill_rank=rank,
            stage=stage,
            target_heads=target[i],
            draft_heads=draft[i] if stage == topology.last_stage else NO_HEADS,
            sends_aux=i == 0 and stage == topology.stages[-1],
            sends_state=i == 0 or topology.sharded_state,
        )
        for i, rank in enumerate(ranks)
        for stage in topology.stages
    )


def route_of(table: Iterable[Route], prefill_rank: int, stage: int) -> Route | None:
    """The row of one prefill rank and stage, None when that rank is not contacted."""
    return next((r for r in table if (r.prefill_rank, r.stage) == (prefill_rank, stage)), None)


def required_responses(table: Iterable[Route]) -> int:
    """Answers a decode rank waits for: the number of its distinct senders."""
    return sum(not route.is_dummy for route in table)
