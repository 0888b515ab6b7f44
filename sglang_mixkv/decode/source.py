"""One prefill server as this decode rank sees it: made when it is resolved, frozen after.

Everything that follows from the two servers alone is worked out here, once: who sends what, how
many answers a room needs, what each prefill rank is told at registration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from uuid import uuid4

from sglang_mixkv.decode.slices import Slices
from sglang_mixkv.errors import MixKVError, refuse
from sglang_mixkv.kv.layout import Caches, Kind, Shard, Spread
from sglang_mixkv.kv.routes import Route, Topology, check_dcp, required_responses, routes
from sglang_mixkv.protocol.extension import Extension, notice_of
from sglang_mixkv.protocol.facts import Facts

# More ranks in any one dimension than a prefill server can have: lists of them are made.
MAX_RANKS = 4096


@dataclass(frozen=True)
class Local:
    """This decode rank. `tp`, `rank`: attention TP; `aux_ptrs`, `aux_rows`: addresses and
    rows of its metadata buffers.

    `kv_data_lens`, `state_lens`: bytes of every region that it registers. `process`: of no other
    start of a decode rank.
    """

    facts: Facts
    caches: Caches
    tp: int
    rank: int
    pp_size: int
    pp_rank: int
    dcp_size: int
    sharded_state: bool
    kv_data_lens: tuple[int, ...]
    state_lens: tuple[tuple[int, ...], ...]
    aux_ptrs: tuple[int, ...]
    aux_rows: tuple[int, ...]
    process: str = field(default_factory=lambda: uuid4().hex)

    @property
    def page_size(self) -> int:
        return self.caches.target.page_size

    @property
    def has_draft(self) -> bool:
        """Then the plugin decides who sends what, else SGLang does."""
        return self.caches.draft is not None


@dataclass(frozen=True)
class Sizes:
    """A prefill server's sizes, as its bootstrap server tells them."""

    attn_tp: int
    attn_cp: int
    dp: int
    pp: int

    def check(self, *, with_draft: bool) -> None:
        """Raise MixKVError for sizes that no server has, or that are not supported."""
        sizes = (self.attn_tp, self.attn_cp, self.dp, self.pp)
        if not all(0 < size <= MAX_RANKS for size in sizes):
            text = f"the prefill server has sizes (TP, CP, DP, PP) {sizes}."
            raise MixKVError("MIXKV-PAIR-04", text)
        if with_draft and self.attn_cp != 1:
            raise MixKVError(
                "MIXKV-PAIR-04",
                f"the prefill server has attention CP {self.attn_cp}; with a drafter only 1 is "
                "supported. Use tensor or DP attention on the prefill side.",
            )


@dataclass(frozen=True)
class Source:
    """`facts`: the prefill server's. `cold`: it sends no draft KV. `verify`: its KV is compared
    before a request starts.

    `routes`: this rank's table; `senders`, `contacted`: prefill ranks by SGLang's unique number,
    those that send anything, and all that are asked to; `kv_senders`: those that send KV, with
    their routes. `target`, `draft`: heads as this rank receives them, the drafter's by window, of
    which none may come. `required`: answers that a room waits for. `knows_extents`: see
    kv/extents.py.
    """

    address: str
    facts: Facts
    sizes: Sizes
    cold: bool
    verify: bool
    stages: tuple[int, ...]
    routes: tuple[Route, ...]
    contacted: frozenset[int]
    senders: frozenset[int]
    kv_senders: Mapping[int, Route]
    target: Slices
    draft: tuple[Slices, ...]
    required: int
    knows_extents: bool

    def route(self, prefill_rank: int, stage: int) -> Route:
        """This rank's row of the table for one prefill rank that it contacts. Raises MixKVError
        for another."""
        for route in self.routes:
            if (route.prefill_rank, route.stage) == (prefill_rank, stage):
                return route
        raise refuse(
            "MIXKV-PAIR-05",
            f"SGLang to contact prefill ranks {[(r.prefill_rank, r.stage) for r in self.routes]} "
            "(attention-TP rank, pipeline stage)",
            f"({prefill_rank}, {stage})",
            "that rank would be registered with by no route",
            "Start both sides with the same SGLang and sglang-mixkv",
        )

    def needed_bytes(self, local: Local, pages: int) -> tuple[int, int]:
        """What a request of so many pages needs of it, target and draft, in bytes."""
        parts = [pages * slices.shard.parts for slices in self.draft]
        draft = sum(
            (count - slices.first_page(count)) * sum(slices.shard.component.item_lens)
            for slices, count in zip(self.draft, parts, strict=True)
        )
        return pages * sum(local.caches.target.component.item_lens), draft

    def extension(self, local: Local, route: Route, staging: tuple[int, int]) -> Extension:
        """What the prefill rank with this route is told at registration. `staging`: address and
        bytes of the buffer in which this rank grants regions."""
        own = local.caches.draft
        spread = own.component.spread if own else Spread(Kind.MLA)
        windows = own.component.windows if own else ()
        alike = len(set(windows)) == 1
        return Extension(
            facts=local.facts,
            num_draft_entries=len(local.caches.draft_ptrs),
            draft_kind=spread.kind.value,
            draft_heads=len(own.heads) if own else 0,
            draft_total_heads=spread.total_heads,
            kv_data_lens=local.kv_data_lens,
            route=notice_of(route),
            stages=self.stages,
            draft_window=windows[0] if alike else 0,
            draft_windows=() if alike else windows,
            staging=staging,
            aux_rows=min(local.aux_rows, default=0),
            cold=self.cold,
            verify=self.verify,
            state_lens=local.state_lens,
            process=local.process,
        )


def source_of(
    local: Local, address: str, sizes: Sizes, facts: Facts, *, cold: bool, verify: bool
) -> Source:
    """`facts`: the prefill server's. Raises MixKVError for sizes that do not fit."""
    sizes.check(with_draft=local.has_draft)
    caches = local.caches
    draft = None if cold else caches.draft
    stages = (local.pp_rank,) if sizes.pp == local.pp_size else tuple(range(sizes.pp))
    if local.has_draft:
        spread = caches.target.component.spread
        check_dcp((sizes.attn_tp, facts.dcp), (local.tp, local.dcp_size), spread)
    table = routes(
        Topology(
            prefill_tp=sizes.attn_tp,
            decode_tp=local.tp,
            target=caches.target.component.spread,
            draft=draft.component.spread if draft else None,
            stages=stages,
            last_stage=sizes.pp - 1,
            sharded_state=local.sharded_state,
        ),
        local.rank,
    )
    numbered = {route.prefill_rank * sizes.pp + route.stage: route for route in table}
    kv = {n: r for n, r in numbered.items() if r.is_send_target or r.is_send_draft}
    return Source(
        address=address,
        facts=facts,
        sizes=sizes,
        cold=cold,
        verify=verify,
        stages=stages,
        routes=table,
        contacted=frozenset(numbered),
        senders=frozenset(n for n, route in numbered.items() if not route.is_dummy),
        kv_senders=MappingProxyType(kv),
        target=_slices(caches.target, caches.target_ptrs, table, sizes.attn_tp, draft=False),
        draft=_slices(
            draft.split(local.dcp_size // facts.dcp), caches.draft_ptrs, table, sizes.attn_tp,
            draft=True,
        ).by_window
        if draft
        else (),
        required=required_responses(table),
        knows_extents=facts.extents,
    )  # fmt: skip


def _slices(
    shard: Shard, ptrs: tuple[int, ...], table: tuple[Route, ...], prefill_tp: int, *, draft: bool
) -> Slices:
    heads = {
        (route.prefill_rank, route.stage): route.draft_heads if draft else route.target_heads
        for route in table
    }
    return Slices(shard, ptrs, {who: held for who, held in heads.items() if held}, prefill_tp)
