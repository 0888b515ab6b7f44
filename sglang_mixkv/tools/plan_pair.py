"""The plan of a pair as a value: whether it needs the plugin, who reads what, what goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sglang_mixkv import __version__, refusals
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.channel.slots import SLOTS, share_of, slot_bytes
from sglang_mixkv.draft.facts import Difference, Row, Severity, differences
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout, heads_on_rank
from sglang_mixkv.draft.routes import readers_of, routes
from sglang_mixkv.draft.window import pages_left_out
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_need import Need, need_of
from sglang_mixkv.tools.plan_server import Model, Server

LONG = 16 << 10  # tokens of a prompt that a window is shown by


class Read(msgspec.Struct, frozen=True):
    """What a decode rank reads from a prefill rank that it opens: attention-TP ranks, the same in
    each group."""

    decode_rank: int
    prefill_rank: int
    heads: tuple[int, ...]
    bytes_per_token: int


class Fleet(msgspec.Struct, frozen=True):
    """So many servers of each role. `readers`: decode ranks that read a prefill rank; `sources`:
    prefill ranks that a decode rank reads. `slots`: what two ranks share while all are busy, and
    how many `tokens` fit them."""

    prefill_servers: int
    decode_servers: int
    readers: int
    sources: int
    slots: int
    tokens: int


class Plan(msgspec.Struct, frozen=True):
    """`need`: None where nothing serves the pair. `reads` is empty and `fleet` None without a
    route. `findings`: what is refused or goes wrong."""

    need: Need | None
    prefill: Server
    decode: Server
    reads: tuple[Read, ...]
    fleet: Fleet | None
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def make_plan(prefill: Server, decode: Server, servers: tuple[int, int] = (1, 1)) -> Plan:
    """With all findings at once. `servers`: how many there are of each role."""
    facts, no_route = decode.facts, [*_no_route(prefill, decode)]
    need = None if no_route else need_of(prefill, decode)
    sizes = prefill.attention_tp, decode.attention_tp
    reads, fleet = list[Read](), None
    if facts is not None and facts == prefill.facts and not no_route:
        reads = list(_reads(facts, *sizes))
        fleet = _fleet(reads, prefill, decode, servers)
    findings = (*_findings(prefill, decode, need), *no_route)
    notes = tuple(dict.fromkeys(_notes(prefill, decode)))
    return Plan(need, prefill, decode, tuple(reads), fleet, findings, notes)


# ---------------------------------------------------------------- figures


def contacted(prefill_tp: int, decode_tp: int, rank: int) -> range:
    """Prefill ranks that a decode rank asks, by SGLang's CommonKVManager._resolve_rank_mapping."""
    if prefill_tp <= decode_tp:
        first = rank // (decode_tp // prefill_tp)
        return range(first, first + 1)
    ratio = prefill_tp // decode_tp
    return range(rank * ratio, (rank + 1) * ratio)


def _reads(facts: DraftFacts, theirs: int, ours: int) -> Iterator[Read]:
    for rank in range(ours):
        ranks = contacted(theirs, ours, rank)
        held = [heads_on_rank(facts.total_heads, theirs, other) for other in ranks]
        table = routes(held, heads_on_rank(facts.total_heads, ours, rank))
        for other, heads in zip(ranks, table, strict=True):
            yield Read(rank, other, tuple(heads), facts.bytes_per_token(len(heads)))


def _fleet(reads: list[Read], prefill: Server, decode: Server, servers: tuple[int, int]) -> Fleet:
    """Each decode rank may read from every prefill server, and from each of its groups."""
    assert decode.facts is not None
    read = [one for one in reads if one.heads]
    sources = Counter(one.decode_rank for one in read).most_common(1)[0][1]
    readers = Counter(one.prefill_rank for one in read).most_common(1)[0][1]
    sources *= servers[0] * prefill.groups
    readers *= servers[1] * decode.groups
    slots = share_of(SLOTS, max(readers, sources))
    size = slot_bytes(min(prefill.config.staging_mb, decode.config.staging_mb))
    per_slot = decode.facts.tokens_in(size, max(len(one.heads) for one in read))
    return Fleet(*servers, readers, sources, slots, slots * per_slot)


# ---------------------------------------------------------------- what goes wrong


def _no_route(prefill: Server, decode: Server) -> Iterator[str]:
    """Sizes that do not divide, and a drafter's heads that do not."""
    uneven = [side.role for side in (prefill, decode) if not side.attention_tp]
    if uneven:
        yield (
            f"[MIXKV-PAIR-04] {' and '.join(uneven)}: the TP size is no multiple of its "
            "DP-attention and CP sizes. Change --tp-size or --attn-dp-size."
        )
        return
    try:
        readers_of(prefill.attention_tp, decode.attention_tp)
    except MixKVError as error:
        yield str(error)
    for side in (prefill, decode):
        try:
            if side.facts is not None:
                heads_on_rank(side.facts.total_heads, side.attention_tp, 0)
        except MixKVError as error:
            yield str(error.about(side.role))


# SGLang compares the first two when a pair meets (common/conn.py, try_ensure_parallel_info).
_ALIKE = {
    "page_size": "SGLang refuses the pair",
    "kv_cache_dtype": "SGLang refuses the pair",
    "disaggregation_enable_kv_checksum": "metadata rows differ",
}


def _findings(prefill: Server, decode: Server, need: Need | None) -> Iterator[str]:
    """SGLang's own refusals, the plugin's where it is asked for or needed, and the pair's."""
    for server in (prefill, decode):
        yield from server.stock
        if server.enabled or (need is not None and need.needed):
            yield from server.refused
    if prefill.enabled != decode.enabled:
        yield "[MIXKV-PAIR-01] --enable-mixkv: on one side only. Set it on both, or on neither."
    for name, why in _ALIKE.items():
        flag = f"--{name.replace('_', '-')}"
        yield from _differ(flag, getattr(prefill, name), getattr(decode, name), why)
    if decode.pp_size != 1:
        why = "SGLang takes 1 or prefill's on decode"
        yield from _differ("--pp-size", prefill.pp_size, decode.pp_size, why)
    yield from _models(prefill, decode)
    is_cold = decode.config.on_draft_mismatch == "cold"
    served = {Severity.COLD, Severity.MISMATCH} if is_cold else {Severity.COLD}
    topks = [side.speculative_eagle_topk or 0 for side in (prefill, decode)]
    if not all(topks):
        topks = [0, 0]  # SGLang did not resolve a line so far, or speculates on one side alone
    for found in differences(_row(prefill, topks[0]), _row(decode, topks[1])):
        if found.severity not in served:
            yield f"[MIXKV-PAIR-03] {found}"


def _row(server: Server, topk: int) -> Row:
    """What its ranks would publish, without what only a running one knows."""
    facts, tp = server.facts, max(1, server.attention_tp)
    return Row(
        PROTOCOL, __version__, sglang_version(), bytes(8), "", 0, "", tp, 0, 0, (),
        server.disaggregation_transfer_backend, server.stage, topk,
        DraftLayout(facts, tp, 0) if facts else None,
    )  # fmt: skip


def _models(prefill: Server, decode: Server) -> Iterator[str]:
    """What nothing compares."""
    for side in (prefill, decode):
        head = side.draft.architecture if side.draft else ""
        if words := refusals.other_head(head, side.speculative_algorithm or ""):
            yield f"{side.role}: {words}"
    here, there = (model_text(side.target) for side in (prefill, decode))
    yield from _differ("target", here, there, "its KV would be in wrong rows")
    here, there = (model_text(side.draft) for side in (prefill, decode))
    if prefill.draft and here != there and (prefill.facts is None or decode.facts is None):
        yield from _differ("drafter", here, there, "its KV cannot be moved")
    elif decode.draft and not decode.draft.kv_heads and decode.target.kv_heads:
        yield (
            "[MIXKV-START-05] an MLA drafter beside a target with KV heads: SGLang would pair its "
            "rows with others. Use a drafter with KV heads."
        )


def _differ(what: str, prefill: object, decode: object, why: str) -> Iterator[str]:
    if prefill != decode:
        found = Difference(
            Severity.REFUSED, what, str(prefill), str(decode), why, "Give both sides the same"
        )
        yield f"[MIXKV-PAIR-03] {found}"


def model_text(model: Model | None) -> str:
    if model is None:
        return "none"
    heads = f"{model.kv_heads} KV heads" if model.kv_heads else "MLA"
    return f"{model.architecture} ({heads}, {model.layers} layer{'s' * (model.layers > 1)})"


def _notes(prefill: Server, decode: Server) -> Iterator[str]:
    yield from (*prefill.notes, *decode.notes)
    kinds = dict.fromkeys(filter(None, (prefill.gpu, decode.gpu)))
    for gpu in kinds:
        roles = " and ".join(side.role for side in (prefill, decode) if side.gpu == gpu)
        yield f"{roles}: resolved as on a {gpu.title()} GPU (--gpu)"
    for what, here, there in (
        ("target", prefill.target, decode.target),
        ("drafter", prefill.draft, decode.draft),
    ):
        if here and there and Path(here.path).name != Path(there.path).name:
            yield (
                f"{what}: prefill loads {here.path}, decode {there.path}; nothing compares their "
                "weights, so make sure that both are one model"
            )
    if prefill.draft is None and decode.draft is not None:
        yield (
            "speculation on decode alone: each request's drafter starts cold, so fewer drafts are "
            "accepted; give prefill the same --speculative flags"
        )
    yield from _window(prefill, decode)


def _window(prefill: Server, decode: Server) -> Iterator[str]:
    asked = [side.speculative_draft_window_size for side in (prefill, decode)]
    if decode.draft is None or decode.facts is None:
        return
    if (window := decode.draft.window) is not None:
        size, token = decode.page_size or 1, decode.facts.bytes_per_token(decode.facts.total_heads)
        left = pages_left_out(-(-LONG // size), size, window) * size
        yield (
            f"draft window: decode's drafter reads the last {window:,} tokens alone, so that of a "
            f"prompt of {LONG:,} tokens {(LONG - left) * token:,} bytes of draft KV move, and "
            f"{left * token:,} do not"
        )
    elif asked[1]:
        yield (
            f"draft window: --speculative-draft-window-size {asked[1]} saves no bytes, since with "
            "this drafter, attention backend, top-k, sink or prefix cache decode may read all rows"
        )
    if asked[0] != asked[1]:
        yield (
            f"draft window: --speculative-draft-window-size is {asked[0]} on prefill, {asked[1]} "
            "on decode: served, and decode's alone says which rows move"
        )
