"""What each rank publishes of itself, and what a difference between the two sides means.

A prefill rank's row travels with its registration at the bootstrap server, and decode ranks get
all rows from GET /mixkv. Only decode compares. Three kinds of difference:

* REFUSED: the target's bytes or other requests could be hurt, or the pair can never work. The
  decode rank refuses before SGLang's own metadata leaves.
* MISMATCH: the drafters differ. Refused too, unless the operator asked for cold drafters.
* COLD: there is no draft KV to fetch. Served, with a cold drafter.

Not compared, since they cannot hurt: page sizes (tokens are on the wire),
--speculative-num-steps and --speculative-num-draft-tokens (how far decode drafts), numbers of
slots, weights and model names (two names can hold one model).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_mixkv.channel.messages import PROTOCOL, Instance
from sglang_mixkv.draft.layout import DraftLayout, Name, Rank
from sglang_mixkv.draft.targets import Difference as Difference
from sglang_mixkv.draft.targets import Severity as Severity
from sglang_mixkv.draft.targets import Target, unmixed, unmoved

MAX_ROW_BYTES = 64 << 10
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class StagingFacts(msgspec.Struct, frozen=True):
    """A prefill rank's slots, and how to reach them. `base`: the address of slot 0."""

    data_plane: Name
    endpoint: Annotated[bytes, Meta(max_length=32 << 10)]
    base: Size
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    slots: Annotated[int, Meta(ge=2, le=1 << 20)]
    device: Annotated[int, Meta(ge=-1, le=1 << 10)] = -1  # -1: host memory

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes


class Row(msgspec.Struct, frozen=True):
    """One rank. `protocol` stays the first key, and is read before the rest.

    `rank_ip`, `rank_port`: SGLang's own key of the rank (PrefillRankInfo). `address`: where the
    channel's socket listens, or "" on a rank without one. `aux_item_lens`: bytes of each metadata
    row. `backend`: SGLang's, which moves the target. `draft`, `staging`: None on a rank without
    draft KV of its own. `patience`: SGLANG_MIXKV_PATIENCE, by which its slots are used again.
    """

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
    """Raises ValueError for bytes that are no row of a protocol that this build reads."""
    if len(data) > MAX_ROW_BYTES:
        raise ValueError(f"a row of {len(data)} bytes")
    try:
        oldest, newest = msgspec.json.decode(data, type=_Versioned).protocol
        if common_version((oldest, newest), PROTOCOL) is None:
            raise ValueError(f"protocol {oldest} to {newest}; this build reads {PROTOCOL}")
        return msgspec.json.decode(data, type=Row)
    except RecursionError as error:
        raise ValueError("a row that is nested too deeply") from error


def common_version(left: tuple[int, int], right: tuple[int, int]) -> int | None:
    """The newest version that both ranges hold; None where they do not meet."""
    newest = min(left[1], right[1])
    return newest if newest >= max(left[0], right[0]) else None


NO_DRAFTER = "drafter with KV heads"
_SAME_DRAFTER = "Start both sides with the same drafter and draft KV dtype"
# field of DraftFacts, its name in words, what a difference would cause
_COMPARED = (
    ("architecture", "drafter architecture", "it is another model"),
    ("algorithm", "speculative algorithm", "the drafter's rows mean something else"),
    ("total_heads", "KV heads of the drafter", "heads would be cut at wrong offsets"),
    ("head_bytes", "bytes per token and head of the drafter", "layers or head sizes differ"),
    ("dtype", "dtype of the drafter's KV", "its numbers would be read as another type"),
)


def differences(prefill: Row, decode: Row) -> list[Difference]:
    """What is not alike between a prefill rank and this decode rank, the gravest first."""
    found = [*_target(prefill, decode), *_aux(prefill, decode), *_draft(prefill, decode)]
    return sorted(found, key=lambda d: list(Severity).index(d.severity))


def _target(prefill: Row, decode: Row) -> Iterator[Difference]:
    if prefill.backend != decode.backend:
        yield Difference(
            Severity.REFUSED, "transfer backend", prefill.backend, decode.backend,
            "the target could not be sent",
            "Set --disaggregation-transfer-backend alike on both sides",
        )  # fmt: skip
    yield from unmixed(prefill.engine, decode.engine, decode.backend)
    sizes = prefill.target, prefill.attn_tp, decode.target, decode.attn_tp
    yield from unmoved(*sizes, prefill.backend)


def _aux(prefill: Row, decode: Row) -> Iterator[Difference]:
    """SGLang sends metadata rows in prefill's length (Mooncake's and NIXL's `send_aux`)."""
    here, there = decode.aux_item_lens, prefill.aux_item_lens
    if here == there:
        return
    longer = len(here) != len(there) or any(p > d for p, d in zip(there, here, strict=True))
    yield Difference(
        Severity.REFUSED if longer else Severity.COLD,
        "bytes of the metadata rows", str(list(there)), str(list(here)),
        "metadata of other requests would be overwritten" if longer
        else "the drafter starts without its hidden state",
        "Enable speculation, --disaggregation-enable-kv-checksum and sampling masks on both sides "
        "or on neither",
    )  # fmt: skip


def _draft(prefill: Row, decode: Row) -> Iterator[Difference]:
    here, there = decode.draft, prefill.draft
    if here is None:
        return
    if there is None:
        yield Difference(
            Severity.COLD, NO_DRAFTER, "none", here.facts.architecture,
            "its KV cannot be fetched",
            "Start prefill with the same --speculative-draft-model-path",
        )  # fmt: skip
        return
    compared = [
        (what, getattr(there.facts, field), getattr(here.facts, field), consequence, _SAME_DRAFTER)
        for field, what, consequence in _COMPARED
    ]
    compared += [
        ("--speculative-eagle-topk", prefill.topk, decode.topk,
         "the top-k rows that travel with each request differ", "Set it alike on both sides"),
    ]  # fmt: skip
    planes = [row.staging.data_plane if row.staging else "none" for row in (prefill, decode)]
    if planes[0] != planes[1]:
        yield Difference(
            Severity.REFUSED, "data plane", planes[0], planes[1], "draft KV could not be read",
            "Set SGLANG_MIXKV_DATA_PLANE alike on both sides",
        )  # fmt: skip
    for what, left, right, consequence, remedy in compared:
        if left != right:
            mismatch = Severity.MISMATCH
            yield Difference(mismatch, what, str(left), str(right), consequence, remedy)
