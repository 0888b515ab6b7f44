"""The row of facts that each rank publishes about itself.

A prefill rank's row travels with its registration to the bootstrap server, and decode ranks get all
rows from GET /mixkv. Only decode compares them (decode/compare.py).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_mixkv.channel.messages import PROTOCOL, Instance
from sglang_mixkv.draft.layout import DraftLayout, Heads, Name, Rank

MAX_ROW_BYTES = 64 << 10
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Few = Annotated[int, Meta(ge=0, le=1 << 20)]


class Target(msgspec.Struct, frozen=True):
    """The target's KV on one rank, as in SGLang's KV args. `heads`: over all ranks, 0 for MLA.
    `entries`: this stage's buffers. `states`: SGLang's names for the state sent beside KV.
    `drafts`: how many of a drafter's buffers SGLang sends. `widths`: the distinct sizes of a
    buffer's page. `units`: the distinct sizes of a row of linear-attention state that TP shards."""

    heads: Few
    entries: Few
    layer_ids: bool
    even: bool
    stages: Heads = 1
    dcp: Heads = 1
    states: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    drafts: Few = 0
    widths: Annotated[tuple[Size, ...], Meta(max_length=64)] = ()
    units: Annotated[tuple[Size, ...], Meta(max_length=64)] = ()

    @property
    def is_mla(self) -> bool:
        return self.heads == 0


class StagingFacts(msgspec.Struct, frozen=True):
    """A prefill rank's slots, and how to reach them. `base`: the address of slot 0."""

    data_plane: Name
    endpoint: Annotated[bytes, Meta(max_length=32 << 10)]
    base: Size
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    slots: Annotated[int, Meta(ge=2, le=1 << 20)]


class Row(msgspec.Struct, frozen=True):
    """One rank's facts; for the fields see docs/protocol.md, "Facts". `protocol` stays the first
    key and is read before the rest. `address`: "" on a rank without a channel. `draft`, `staging`:
    None on a rank without draft KV of its own."""

    protocol: tuple[Rank, Rank]
    plugin: Name
    engine: Name
    instance: Instance
    rank_ip: Name
    rank_port: Annotated[int, Meta(ge=0, le=65535)]
    address: Name
    attn_tp: Rank
    attn_tp_rank: Rank
    pp_rank: Rank
    aux_item_lens: Annotated[tuple[Size, ...], Meta(max_length=256)]
    backend: Name
    target: Target
    topk: Rank = 0
    draft: DraftLayout | None = None
    staging: StagingFacts | None = None
    patience: Annotated[float, Meta(ge=0.1, le=60)] = 1.0


class _Versioned(msgspec.Struct):
    protocol: tuple[int, int]


def read_row(data: bytes) -> Row:
    """Decode a row. Raises ValueError if it is malformed or this build cannot read its protocol."""
    if len(data) > MAX_ROW_BYTES:
        raise ValueError(f"a row of {len(data)} bytes")
    try:
        oldest, newest = msgspec.json.decode(data, type=_Versioned).protocol
        if min(newest, PROTOCOL[1]) < max(oldest, PROTOCOL[0]):
            raise ValueError(f"protocol {oldest} to {newest}; this build reads {PROTOCOL}")
        return msgspec.json.decode(data, type=Row)
    except RecursionError as error:
        raise ValueError("the row is nested too deeply") from error
