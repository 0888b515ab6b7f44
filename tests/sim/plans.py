"""Whom a decode rank contacts for a request, and what the real facts make of it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode import plan as plans
from sglang_mixkv.draft.facts import Row, StagingFacts
from sglang_mixkv.draft.layout import SLOT_OVERHEAD, DraftFacts, DraftLayout
from sglang_mixkv.draft.targets import Target
from sglang_mixkv.tools.plan_pair import contacted
from tests.sim.spec import Server

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.spec import Request
    from tests.sim.world import World


@lru_cache(1 << 12)
def layout_of(heads: int, tp: int, rank: int) -> DraftLayout:
    return DraftLayout(DraftFacts("A", "EAGLE3", heads, (1, 1), "bf16"), tp, rank)


@lru_cache(1 << 12)
def slot_bytes(heads: int, tp: int, tokens: int) -> int:
    layout = layout_of(heads, tp, 0)
    return SLOT_OVERHEAD + tokens * layout.facts.bytes_per_token(len(layout.heads))


def contacts(world: World, request: Request, rank: DecodeRank) -> range:
    """Ranks of the prefill group."""
    theirs, ours = world.spec.servers[request.prefill[0]].tp, rank.place.server.tp
    return contacted(theirs, ours, rank.place.tp_rank)


def plan_for(
    world: World, request: Request, rank: DecodeRank, instances: tuple[bytes, ...]
) -> plans.Plan:
    """The real plan, with the instances that the rank knows. Raises MixKVError where refused."""
    prefill = world.spec.servers[request.prefill[0]]
    plan = make_plan(world.spec.heads, prefill, rank.place.server, rank.place.tp_rank)
    indices = contacts(world, request, rank)
    sources = tuple(
        replace(source, peer=instances[indices[i]]) for i, source in enumerate(plan.sources)
    )
    return plans.Plan(sources, (), plan.version, plan.cold)


PLANS: dict[tuple, plans.Plan] = {}  # by all that they depend on


def make_plan(heads: int, prefill: Server, decode: Server, rank: int) -> plans.Plan:
    of = (
        prefill.tp,
        prefill.slots,
        prefill.tokens,
        prefill.plugin,
        prefill.drafter,
        prefill.patience,
    )
    key = (heads, of, decode.tp, decode.slots, decode.tokens, decode.drafter, rank)
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = _make_plan(heads, prefill, decode, rank)
    return plan


def _make_plan(heads: int, prefill: Server, decode: Server, rank: int) -> plans.Plan:
    rows = {}
    if prefill.plugin:
        rows = {("p", i): _row(heads, prefill, i) for i in range(prefill.tp)}
    indices = contacted(prefill.tp, decode.tp, rank)
    found = [plans.Contact("p", i, True) for i in indices]
    return plans.make_plan(found, rows, _row(heads, decode, rank), serve_mismatch=True)


def _row(heads: int, server: Server, rank: int) -> Row:
    size = slot_bytes(heads, server.tp, server.tokens)
    return Row(
        PROTOCOL, "", "", b"%8d" % rank, "p", rank, "", server.tp, rank, 0, (),
        "mooncake", Target(0, 1, layer_ids=False, even=True),
        topk=1 if server.drafter == "other" else 0,
        draft=None if server.drafter == "none" else layout_of(heads, server.tp, rank),
        staging=StagingFacts("mooncake", b"", 0, size, server.slots), patience=server.patience,
    )  # fmt: skip
