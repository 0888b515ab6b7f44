"""The plan as a value: the core's routes and copies, run over two described servers.

servers -> resolved -> caches -> refusals -> one RankPlan a decode rank -> Plan
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from sglang_mixkv import __version__
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.layout import Component, Shard
from sglang_mixkv.kv.plan import Copies, component_copies
from sglang_mixkv.kv.ranges import blocks
from sglang_mixkv.kv.routes import Route, Topology, check_dcp, required_responses, routes
from sglang_mixkv.tools.plan_checks import mismatches, own_refusals, unknown_state, unseen
from sglang_mixkv.tools.plan_flags import Server
from sglang_mixkv.tools.plan_model import Cache, caches
from sglang_mixkv.tools.plan_resolved import resolved
from sglang_mixkv.tools.plan_stock import stock_refusals

SCHEMA = 1
TOKENS = 1000


class Model(msgspec.Struct, frozen=True):
    """A cache in words. `row_bytes`: bytes per token over all layers of the whole model."""

    architecture: str
    kind: str
    kv_heads: int
    layers: int
    dtype: str
    row_bytes: int


class Side(msgspec.Struct, frozen=True):
    """One server. `enabled`: None where that cannot be seen from outside."""

    tp: int
    attention_tp: int
    dp_groups: int
    pp: int
    page_size: int | None
    enabled: bool | None
    dcp: int = 1


class Load(msgspec.Struct, frozen=True):
    """Target and draft bytes per token; descriptors for 1,000 tokens on the direct path, with
    all pages in one run and with none next to another."""

    target_bytes: int = 0
    draft_bytes: int = 0
    descriptors_one_run: int = 0
    descriptors_scattered: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(*(getattr(self, f) + getattr(other, f) for f in Load.__struct_fields__))


class Sender(msgspec.Struct, frozen=True):
    """What one prefill rank sends to one decode rank. Heads are global KV head numbers;
    an MLA row counts as head 0."""

    prefill_rank: int
    stage: int
    dummy: bool
    target_heads: tuple[int, ...]
    draft_heads: tuple[int, ...]
    aux: bool
    state: bool
    load: Load


class RankPlan(msgspec.Struct, frozen=True):
    """One decode rank (attention-TP number within its DP group) and all it hears from."""

    decode_rank: int
    decode_stage: int
    expected_responses: int
    senders: tuple[Sender, ...]

    @property
    def load(self) -> Load:
        return sum((sender.load for sender in self.senders), Load())


class Plan(msgspec.Struct, frozen=True):
    """`total`: over all decode ranks that serve one request. `ranks` is empty when the two sides
    do not fit. `page_size`: tokens a page that the figures assume."""

    schema: int
    plugin: str
    prefill: Side | None
    decode: Side | None
    target: Model
    draft: Model | None
    page_size: int
    ranks: tuple[RankPlan, ...]
    total: Load
    refused: tuple[str, ...]
    unknown: tuple[str, ...]


class _Pair(msgspec.Struct, frozen=True):
    """Both servers and the prefill's caches, which the handshake holds equal to the decode's."""

    prefill: Server
    decode: Server
    target: Cache
    draft: Cache | None
    page_size: int


def make_plan(prefill: Server, decode: Server) -> Plan:
    """The plan of this pair of servers, or the reasons why there is none.

    Raises MixKVError for models whose caches cannot be described.
    """
    prefill, decode, unresolved = resolved(prefill, decode)
    target, draft, points = caches(prefill)
    other, other_draft, _ = caches(decode)
    page_size = prefill.page_size or decode.page_size or 1
    different = mismatches(prefill, decode, (target, draft), (other, other_draft))
    found = [reason for server in (prefill, decode) for reason in _alone(server, target)]
    found += different
    unknown = [*unseen(prefill, decode), *unresolved, *points]
    ranks: tuple[RankPlan, ...] = ()
    try:
        if not different:
            ranks = tuple(_ranks(_Pair(prefill, decode, target, draft, page_size)))
    except MixKVError as error:
        found.append(str(error))
    return Plan(
        schema=SCHEMA, plugin=__version__, prefill=_side(prefill), decode=_side(decode),
        target=_model(target), draft=_model(draft) if draft else None,
        page_size=page_size, ranks=ranks,
        total=sum((rank.load for rank in ranks), Load()),
        refused=tuple(dict.fromkeys(found)), unknown=tuple(unknown),
    )  # fmt: skip


def _alone(server: Server, target: Cache) -> Iterator[str]:
    """What stops a server whatever its peer is."""
    yield from own_refusals(server)
    yield from unknown_state(server, target)
    yield from stock_refusals(server)


def _side(server: Server) -> Side | None:
    args = server.args
    try:
        tp = server.attention_tp
    except MixKVError:
        return None
    return Side(
        args.tp_size, tp, server.dp_groups, args.pp_size, server.page_size, server.enabled,
        args.dcp_size,
    )  # fmt: skip


def _model(cache: Cache) -> Model:
    heads = cache.spread.total_heads
    row = sum(cache.head_bytes(cache.layers)) * (heads or 1)
    kind = cache.spread.kind.value
    return Model(cache.architecture, kind, heads, cache.layers, cache.dtype, row)


def _ranks(pair: _Pair) -> Iterator[RankPlan]:
    """A decode rank of each decode stage. A stage contacts its own prefill stage, or all."""
    if pair.draft:
        sizes = [(side.attention_tp, side.args.dcp_size) for side in (pair.prefill, pair.decode)]
        check_dcp(sizes[0], sizes[1], pair.target.spread)
    stages, own = pair.prefill.args.pp_size, pair.decode.args.pp_size
    for stage in range(own):
        contacted = (stage,) if own == stages else tuple(range(stages))
        topology = Topology(
            prefill_tp=pair.prefill.attention_tp, decode_tp=pair.decode.attention_tp,
            target=pair.target.spread, draft=pair.draft.spread if pair.draft else None,
            stages=contacted, last_stage=stages - 1, sharded_state=pair.target.state == "sharded",
        )  # fmt: skip
        for rank in range(topology.decode_tp):
            table = routes(topology, rank)
            senders = tuple(_sender(pair, topology, rank, route) for route in table)
            yield RankPlan(rank, stage, required_responses(table), senders)


def _sender(pair: _Pair, topology: Topology, decode_rank: int, route: Route) -> Sender:
    layers = stage_layers(pair.target.layers, route.stage, pair.prefill.args.pp_size)
    size = pair.page_size * pair.prefill.args.dcp_size
    target = _copies(pair.target, layers, size, topology, decode_rank, route, "target")
    load = _dealt(pair, _load(target, size, "target"), len(target))
    if pair.draft and route.is_send_draft:
        draft = pair.draft
        copies = _copies(draft, draft.layers, size, topology, decode_rank, route, "draft")
        load += _load(copies, size, "draft")
    return Sender(
        prefill_rank=route.prefill_rank, stage=route.stage, dummy=route.is_dummy,
        target_heads=tuple(route.target_heads), draft_heads=tuple(route.draft_heads),
        aux=route.sends_aux, state=route.sends_state and pair.target.state != "none", load=load,
    )  # fmt: skip


def _dealt(pair: _Pair, load: Load, entries: int) -> Load:
    """The target's, where decode context parallelism deals out its tokens: one range each, unless
    they lie alike on both sides."""
    ours, theirs = pair.prefill.args.dcp_size, pair.decode.args.dcp_size
    ranges = (load.descriptors_one_run, load.descriptors_scattered)
    if ours != theirs:
        ranges = (-(-TOKENS // theirs) * entries,) * 2
    return Load(load.target_bytes // theirs, 0, *ranges)


def stage_layers(layers: int, stage: int, stages: int) -> int:
    """Layers of one pipeline stage: the last ones take one more each of what is left over."""
    return layers // stages + (stage >= stages - layers % stages)


def _copies(
    cache: Cache, layers: int, page_size: int, topology: Topology, decode_rank: int, route: Route,
    component: str,
) -> Copies:  # fmt: skip
    """The core's copies between made-up addresses."""
    heads: range = getattr(route, f"{component}_heads")
    widths = cache.head_bytes(layers)
    src = _shard(cache, widths, page_size, topology.prefill_tp, route.prefill_rank)
    dst = _shard(cache, widths, page_size, topology.decode_tp, decode_rank)
    pairs = [(i, i) for i in range(len(widths))] if heads else []
    nowhere = [0] * len(widths)
    return component_copies(nowhere, src, nowhere, dst, heads, pairs)


def _shard(cache: Cache, widths: tuple[int, ...], page_size: int, tp: int, rank: int) -> Shard:
    held = len(cache.spread.on_rank(tp, rank))
    items = tuple(width * held * page_size for width in widths)
    return Shard(Component(cache.spread, items, items), page_size, tp, rank)


def _load(copies: Copies, page_size: int, component: str) -> Load:
    pages = np.arange(-(-TOKENS // page_size), dtype=np.int64)
    one_run, scattered = (
        len(blocks(copies, page_size, numbers, numbers).length) for numbers in (pages, pages * 2)
    )
    width = int(copies.width.sum())
    target, draft = (width, 0) if component == "target" else (0, width)
    return Load(target, draft, one_run, scattered)
