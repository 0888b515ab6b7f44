"""The plan of a pair as a value: whether it needs the plugin, who reads what, what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from sglang_mixkv import __version__
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.channel.slots import SLOTS, share_of, slot_bytes
from sglang_mixkv.draft.facts import Difference, Row, Severity, differences
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout, heads_on_rank
from sglang_mixkv.draft.routes import readers_of, routes
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_need import Need, need_of
from sglang_mixkv.tools.plan_server import Model, Server

SCHEMA = 2
RANKS = ("prefill_rank", "decode_rank", "all")
PROMPTS = (1 << 10, 1 << 13, 1 << 15, 1 << 17)


class Read(msgspec.Struct, frozen=True):
    """What a decode rank reads from a prefill rank that it opens: numbers in a DP-attention group.
    `tokens_at_once`: of the longest prompt whose segments find slots while none is used again."""

    decode_rank: int
    prefill_rank: int
    heads: tuple[int, ...]
    bytes_per_token: int
    tokens_per_slot: int
    tokens_at_once: int


class Prompt(msgspec.Struct, frozen=True):
    """What one decode rank reads of it. `messages`: each OPEN, READY and ACK."""

    tokens: int
    bytes: int
    segments: int
    messages: int
    at_once: bool


class Plan(msgspec.Struct, frozen=True):
    """`draft_bytes`: of a token. `reads` is empty without a route. `findings`: what is refused or
    goes wrong."""

    schema: int
    plugin: str
    sglang: str
    need: Need | None
    prefill: Server
    decode: Server
    draft_bytes: dict[str, int]
    slots: int
    slot_bytes: int
    reads: tuple[Read, ...]
    prompts: tuple[Prompt, ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def make_plan(prefill: Server, decode: Server) -> Plan:
    """With all findings at once."""
    need, facts = need_of(prefill, decode), decode.facts
    size = slot_bytes(min(prefill.config.staging_mb, decode.config.staging_mb))
    sizes = prefill.attention_tp, decode.attention_tp
    no_route = list(_no_route(sizes, facts))
    reads, draft_bytes = list[Read](), dict[str, int]()
    if facts is not None and facts == prefill.facts and not no_route:
        reads = list(_reads(facts, *sizes, size, prefill.chunk))
        held = [len(heads_on_rank(facts.total_heads, tp, 0)) for tp in sizes]
        for name, heads in zip(RANKS, (*held, facts.total_heads), strict=True):
            draft_bytes[name] = facts.bytes_per_token(heads)
    return Plan(
        SCHEMA, __version__, sglang_version(), need, prefill, decode, draft_bytes, SLOTS,
        size, tuple(reads),
        tuple(_prompt(tokens, reads, prefill.chunk) for tokens in PROMPTS if reads),
        (*_findings(prefill, decode, need), *no_route),
        tuple(dict.fromkeys(_notes(prefill, decode))),
    )  # fmt: skip


# ---------------------------------------------------------------- figures


def contacted(prefill_tp: int, decode_tp: int, rank: int) -> range:
    """Prefill ranks that a decode rank asks, by SGLang's CommonKVManager._resolve_rank_mapping."""
    if prefill_tp <= decode_tp:
        first = rank // (decode_tp // prefill_tp)
        return range(first, first + 1)
    ratio = prefill_tp // decode_tp
    return range(rank * ratio, (rank + 1) * ratio)


def _reads(
    facts: DraftFacts, theirs: int, ours: int, slot_bytes: int, chunk: int
) -> Iterator[Read]:
    readers = readers_of(theirs, ours)
    for rank in range(ours):
        ranks = contacted(theirs, ours, rank)
        held = [heads_on_rank(facts.total_heads, theirs, other) for other in ranks]
        table = routes(held, heads_on_rank(facts.total_heads, ours, rank))
        slots = share_of(SLOTS, max(readers, sum(map(bool, table))))
        for other, heads in zip(ranks, table, strict=True):
            tokens = facts.tokens_in(slot_bytes, len(heads)) if heads else 0
            size, at_once = facts.bytes_per_token(len(heads)), most_tokens(slots, tokens, chunk)
            yield Read(rank, other, tuple(heads), size, tokens, at_once)


def segments_of(tokens: int, per_slot: int, chunk: int) -> int:
    """How many slots a prompt fills. Each of prefill's chunks begins a new one; 0: one chunk."""
    whole, rest = divmod(tokens, chunk or tokens)
    return whole * -(-(chunk or tokens) // per_slot) + -(-rest // per_slot)


def most_tokens(slots: int, per_slot: int, chunk: int) -> int:
    """The longest prompt of so many segments."""
    if not per_slot or not chunk:
        return slots * per_slot
    whole, rest = divmod(slots, -(-chunk // per_slot))
    return whole * chunk + rest * per_slot


def _prompt(tokens: int, reads: Sequence[Read], chunk: int) -> Prompt:
    opened = [read for read in reads if read.decode_rank == 0]  # all decode ranks are alike
    sources = [read for read in opened if read.heads]
    segments = sum(segments_of(tokens, read.tokens_per_slot, chunk) for read in sources)
    size = tokens * sum(read.bytes_per_token for read in sources)
    at_once = all(tokens <= read.tokens_at_once for read in sources)
    return Prompt(tokens, size, segments, len(opened) + 2 * segments, at_once)


# ---------------------------------------------------------------- what goes wrong


def _row(server: Server, topk: int) -> Row:
    """What its ranks would publish, without what only a running one knows."""
    facts, tp = server.facts, max(1, server.attention_tp)
    return Row(
        PROTOCOL, __version__, sglang_version(), bytes(8), "", 0, "", tp, 0, 0, (),
        server.disaggregation_transfer_backend, server.stage, topk,
        DraftLayout(facts, tp, 0) if facts else None,
    )  # fmt: skip


def _no_route(sizes: tuple[int, int], facts: DraftFacts | None) -> Iterator[str]:
    """Sizes that do not divide, and heads that do not on either side."""
    if not all(sizes):
        yield (
            "[MIXKV-PAIR-04] a TP size is no multiple of its DP-attention and CP sizes. Change "
            "--tp-size or --attn-dp-size."
        )
        return
    checks: list[Callable[[], object]] = [partial(readers_of, *sizes)]
    if facts is not None:
        checks += [partial(heads_on_rank, facts.total_heads, tp, 0) for tp in sizes]
    for check in checks:
        try:
            check()
        except MixKVError as error:
            yield str(error)


# SGLang compares the first two when a pair meets (common/conn.py, try_ensure_parallel_info).
_ALIKE = (
    ("page_size", "07", "SGLang refuses the pair"),
    ("kv_cache_dtype", "07", "SGLang refuses the pair"),
    ("disaggregation_enable_kv_checksum", "03", "metadata rows differ"),
)


def _findings(prefill: Server, decode: Server, need: Need | None) -> Iterator[str]:
    """SGLang's own refusals, the plugin's where it is asked for or needed, and the pair's."""
    for server in (prefill, decode):
        yield from server.stock
        if server.enabled is not False or (need is not None and need.needed):
            yield from server.refused
    if {prefill.enabled, decode.enabled} == {True, False}:
        yield "[MIXKV-PAIR-01] --enable-mixkv: on one side only. Set it on both, or on neither."
    for name, code, why in _ALIKE:
        here, there = getattr(prefill, name), getattr(decode, name)
        if here != there:
            yield _differ(code, f"--{name.replace('_', '-')}", here, there, why)
    if decode.pp_size not in (1, prefill.pp_size):
        why = "SGLang takes 1 or prefill's on decode"
        yield _differ("07", "--pp-size", prefill.pp_size, decode.pp_size, why)
    yield from _models(prefill, decode)
    is_cold = decode.config.on_draft_mismatch == "cold"
    served = {Severity.COLD, Severity.MISMATCH} if is_cold else {Severity.COLD}
    topks = [side.speculative_eagle_topk or 0 for side in (prefill, decode)]
    if not all(topks):
        topks = [0, 0]  # SGLang did not resolve a line so far, or speculates on one side alone
    for found in differences(_row(prefill, topks[0]), _row(decode, topks[1])):
        if found.severity not in served:
            yield f"[MIXKV-PAIR-03] {found}"


def _models(prefill: Server, decode: Server) -> Iterator[str]:
    """What nothing compares."""
    here, there = (model_text(side.target) for side in (prefill, decode))
    if here != there:
        yield _differ("03", "target", here, there, "its KV would be in wrong rows")
    here, there = (model_text(side.draft) for side in (prefill, decode))
    if prefill.draft and here != there and (prefill.facts is None or decode.facts is None):
        yield _differ("03", "drafter", here, there, "its KV cannot be moved")
    elif decode.draft and not decode.draft.kv_heads and decode.target.kv_heads:
        yield (
            "[MIXKV-START-05] an MLA drafter beside a target with KV heads: SGLang would pair its "
            "rows with others. Use a drafter with KV heads."
        )


def _differ(code: str, what: str, prefill: object, decode: object, why: str) -> str:
    difference = Difference(
        Severity.REFUSED, what, str(prefill), str(decode), why, "Give both sides the same"
    )
    return f"[MIXKV-PAIR-{code}] {difference}"


def model_text(model: Model | None) -> str:
    if model is None:
        return "none"
    heads = f"{model.kv_heads} KV heads" if model.kv_heads else "MLA"
    return f"{model.architecture} ({heads}, {model.layers} layer{'s' * (model.layers > 1)})"


def _notes(prefill: Server, decode: Server) -> Iterator[str]:
    for server in (prefill, decode):
        yield from server.notes
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
    yield "not seen from here: variables of the two hosts, their releases, the network"
