"""A decode rank's transfer plan for a request to a prefill server, or the server's refusal.

No I/O. `judge` checks all rows of a server once, after GET /mixkv; `make_plan` checks the rows of
the ranks that a request contacts (`bootstrap_infos` of SGLang's receiver).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from sglang_mixkv.channel.handshake import Row
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode.cold import Cold, ColdReason
from sglang_mixkv.decode.compare import NO_DRAFTER, Difference, Severity, differences
from sglang_mixkv.decode.transfer import Source, peer_of
from sglang_mixkv.draft.layout import NO_HEADS, readers_of, routes
from sglang_mixkv.errors import MixKVError, refuse

Rows = Mapping[tuple[str, int], Row]


class Plan(msgspec.Struct, frozen=True):
    """A request's plan. `sources`: ranks of the drafter's stage. `cold`: why nothing is read."""

    sources: tuple[Source, ...]
    version: int = PROTOCOL[1]
    cold: Cold = ""


def judge(
    rows: Collection[Row], own: Row, *, serve_mismatch: bool
) -> tuple[Cold, tuple[Difference, ...]]:
    """Return why requests to a server with these rows are cold ("" if warm), and the tolerated
    differences. Raises MixKVError if the server is refused. `serve_mismatch`: a different drafter
    makes requests cold instead."""
    _check_unique(rows)
    for row in rows:
        readers_of(row.attn_tp, own.attn_tp)
    known = {str(d): d for row in rows for d in differences(row, own)}
    if any(row.draft is not None for row in rows):  # earlier stages need no drafter
        known = {k: d for k, d in known.items() if d.what != NO_DRAFTER}
    cold: Cold = ""
    for text, difference in known.items():
        if difference.severity is Severity.REFUSED:
            raise MixKVError("MIXKV-PAIR-03", text)
        if difference.severity is Severity.COLD:
            cold = cold or ColdReason.NO_DRAFTER
        elif serve_mismatch:
            cold = ColdReason.MISMATCH
        else:
            hint = "Or serve with a cold drafter: --mixkv-on-draft-mismatch cold."
            raise MixKVError("MIXKV-PAIR-03", f"{text} {hint}")
    return cold, tuple(known.values())


def make_plan(
    infos: Sequence[Any], rows: Rows, own: Row, cold: Cold = "", server: str = ""
) -> Plan:
    """Make a request's plan. Raises MixKVError if these ranks are refused. `cold`: the result of
    `judge`. `server`: the bootstrap address."""
    found = [_row_of(info, rows) for info in infos]
    stage = max((row.pp_rank for row in found if row.draft is not None), default=None)
    drafting = [(row, row.draft) for row in found if row.pp_rank == stage and row.draft]
    heads: tuple[range, ...] = (NO_HEADS,) * len(drafting)
    if own.draft is not None and not cold:
        heads = routes([draft.heads for _, draft in drafting], own.draft.heads)
    sources = tuple(
        _source(row, own, of, peer_of(row.instance, server))
        for (row, _), of in zip(drafting, heads, strict=True)
    )
    version = min([PROTOCOL[1], *(row.protocol[1] for row in found)])  # see read_row
    return Plan(sources, version, cold)


def _row_of(info: Any, rows: Rows) -> Row:
    rank = info["rank_ip"], info["rank_port"]
    if rank not in rows:
        expected = "sglang-mixkv in every process of the prefill server"
        got = f"none in the rank at {rank[0]}:{rank[1]}"
        consequence = "its draft KV would be missing, or land in the target's pages"
        remedy = "Start prefill with --enable-mixkv on every node"
        raise refuse("MIXKV-PAIR-01", expected, got, consequence, remedy)
    return rows[rank]


def _check_unique(rows: Collection[Row]) -> None:
    addresses = [row.address for row in rows if row.address]
    if len({row.instance for row in rows}) < len(rows) or len({*addresses}) < len(addresses):
        expected = "an instance and an address of its own for each prefill rank"
        got, remedy = "one that two ranks share", "Restart the prefill server"
        consequence = "heads of one of them would never be read"
        raise refuse("MIXKV-PAIR-04", expected, got, consequence, remedy)


def _source(row: Row, own: Row, heads: range, peer: bytes) -> Source:
    readers = readers_of(row.attn_tp, own.attn_tp)
    if row.staging is None or own.staging is None or own.draft is None:
        return Source(peer, NO_HEADS, readers)
    size = min(row.staging.slot_bytes, own.staging.slot_bytes)
    tokens = own.draft.facts.tokens_in(size, len(heads)) if heads else 0
    return Source(peer, heads, readers, row.staging.slots, tokens, row.patience)
