"""The differences between a prefill rank's row and this decode rank's, and what they mean.

* REFUSED: the target's bytes or other requests could be damaged, or the pair can never work. The
  decode rank refuses before it sends SGLang's own metadata.
* MISMATCH: the drafters differ. Decode refuses this too, unless the operator allowed cold drafters.
* COLD: there is no draft KV to fetch. Requests are served with a cold drafter.

Harmless differences are not compared: page sizes (the wire counts tokens),
--speculative-num-steps and --speculative-num-draft-tokens (how far decode drafts), numbers of
slots, weights and model names (a model may have two names).

The plugin does not touch the target. But between some pairs SGLang itself corrupts the target
without an error, or hangs, with or without a drafter, so such pairs are refused too. Functions
named below are in disaggregation/ of SGLang 0.5.23; tests/protocol/test_target_alone.py shows cases
of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from sglang_mixkv.channel.handshake import Row, Target


class Severity(StrEnum):
    REFUSED = "refused"
    MISMATCH = "mismatch"
    COLD = "cold"


class Difference(msgspec.Struct, frozen=True):
    severity: Severity
    what: str
    prefill: str
    decode: str
    consequence: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.what}: prefill has {self.prefill}, decode has {self.decode}; "
            f"{self.consequence}. {self.remedy}."
        )


_refused = partial(Difference, Severity.REFUSED)


def differences(prefill: Row, decode: Row) -> list[Difference]:
    """List what differs between a prefill rank and this decode rank, the most severe first."""
    rules = _engine, _target, _aux, _draft
    found = [difference for rule in rules for difference in rule(prefill, decode)]
    return sorted(found, key=lambda d: list(Severity).index(d.severity))


MIXES = {
    "mooncake": {("0.5.21", "0.5.22"), ("0.5.21", "0.5.23"), ("0.5.22", "0.5.23")},
    "nixl": {("0.5.21", "0.5.22")},
}
"""Maps a backend to the pairs of SGLang releases (prefill, decode) that serve requests. With any
other mix, SGLang misreads messages and requests hang until they time out, even without the plugin
(tests/e2e/test_mixed_releases.py)."""


def _engine(prefill: Row, decode: Row) -> Iterator[Difference]:
    """Compare backends and releases. All builds of a release (0.5.23+cu130, 0.5.23.post1) match."""
    if prefill.backend != decode.backend:
        remedy = "Set the same --disaggregation-transfer-backend on both sides"
        backends = prefill.backend, decode.backend
        yield _refused("transfer backend", *backends, "the target could not be sent", remedy)
    old, new = (re.sub(r"^(\d+(?:\.\d+)*).*", r"\1", row.engine) for row in (prefill, decode))
    mixes = MIXES.get(decode.backend, set())
    if old != new and (old, new) not in mixes:
        served = sorted(on_decode for on_prefill, on_decode in mixes if on_prefill == old)
        others = f", or {' or '.join(served)} on decode" if served else ""
        consequence = "requests would hang: SGLang itself is not known to work with this mix"
        remedy = f"Install {new} on prefill{others}"
        yield _refused(f"SGLang's release over {decode.backend}", old, new, consequence, remedy)


def _target(prefill: Row, decode: Row) -> Iterator[Difference]:
    """List the differences that prevent SGLang from moving the target's KV correctly."""
    source, wanted, nixl = prefill.target, decode.target, prefill.backend == "nixl"
    unequal = prefill.attn_tp != decode.attn_tp
    tps = f"attention TP {prefill.attn_tp}", f"attention TP {decode.attn_tp}"
    equal_tp = "Give both sides the same attention-TP size"
    stages = f"{source.stages} stages", f"{wanted.stages}"
    mooncake = "Use --disaggregation-transfer-backend mooncake on both sides"
    same_target = "Start both sides with the same model, drafter, KV and state dtypes "
    same_target += "(--kv-cache-dtype, --mamba-ssm-dtype) and attention backends"
    astray = "SGLang does not compare it: bytes would land elsewhere, or its threads would exit"
    thread_ends = "the thread that registers decode ranks would exit"
    relaid = source.dcp == 1 and source.is_mla  # by requires_dcp_relayout, from 1 to any size
    if (source.dcp != wanted.dcp and not relaid) or (unequal and source.dcp > 1):
        sizes = f"{source.dcp} at {tps[0]}", f"{wanted.dcp} at {tps[1]}"
        remedy = f"{equal_tp} and --dcp-size, or --dcp-size 1 on prefill of an MLA target"
        yield _refused("--dcp-size", *sizes, thread_ends, remedy)
    stage = source.stages, prefill.pp_rank
    for what, there, here in _like(source, wanted, prefill.attn_tp, decode.attn_tp):
        if not there <= here and (wanted.stages == 1 or stage == (wanted.stages, decode.pp_rank)):
            left, right = (", ".join(map(str, sorted(one))) or "none" for one in (there, here))
            yield _refused(what, left, right, astray, same_target)
    if source.is_mla or wanted.is_mla:
        return
    # maybe_send_extra; from SGLang 0.5.23 on, try_ensure_parallel_info has the first rule too.
    whole = {name for name in source.states if name.startswith(("minimax", "block_scale"))}
    is_swa = "swa" in source.states and (source.stages > 1 or prefill.engine.startswith("0.5.21"))
    if unequal and (whole or is_swa):
        what = f"target with {', '.join(sorted(whole or {'swa'}))} state at unequal TP"
        consequence = "SGLang does not split it by heads, and no request would be served"
        yield _refused(what, *tps, consequence, equal_tp)
    elif source.stages > 1 and any(name.startswith("minimax") for name in whole):
        what = "pipeline stages of a MiniMax target"
        consequence = "SGLang does not send this target's state from several stages"
        yield _refused(what, *stages, consequence, "Set --pp-size 1 on prefill")
    if unequal and not source.even:  # send_kvcache_slice, _init_hetero_tp_prep_handle
        what = "target with K and V of different widths at unequal TP"
        yield _refused(what, *tps, "V would be cut at K's width", equal_tp)
    if nixl and source.heads < prefill.attn_tp < decode.attn_tp:  # _init_hetero_tp_prep_handle
        what = f"target with {source.heads} KV heads over NIXL"
        yield _refused(what, *tps, thread_ends, f"{equal_tp}. Or: {mooncake}")
    if source.stages <= wanted.stages:
        return
    guesses = not source.layer_ids or (nixl and unequal)  # get_mha_kv_ptrs_with_pp
    if guesses and source.entries * source.stages != wanted.entries * wanted.stages:
        on_prefill, on_decode = f"{source.entries} buffers", f"{wanted.entries}"
        sizes = f"{on_prefill} on one of {stages[0]}", f"{on_decode} on one of {stages[1]}"
        what = "pipeline stages of different lengths"
        remedy = "Use SGLANG_PP_LAYER_PARTITION to give all prefill stages the same number of "
        yield _refused(what, *sizes, "layers would overwrite each other", f"{remedy}layers")
    elif nixl and not source.layer_ids and not unequal:  # build_transfer_entry_pairs
        what = "pipeline stages of a target with KV heads over NIXL"
        yield _refused(what, *stages, thread_ends, f"{mooncake}, or --pp-size 1")


def _like(source: Target, wanted: Target, *tps: int) -> Iterator[tuple[str, set[Any], set[Any]]]:
    """Yield each property of the target that must match, with prefill's and decode's values."""
    is_whole = source.stages == wanted.stages
    yield "buffers of the target", {source.entries} if is_whole else set(), {wanted.entries}
    yield "buffers of the MLA drafter", {source.drafts} - {0}, {wanted.drafts}
    yield "state of the target", {*source.states}, {*wanted.states}
    theirs, ours = (
        {width // max(1, source.heads // tp) for width in side.widths}
        for side, tp in zip((source, wanted), tps, strict=True)
    )
    yield "bytes of a token of the target, by head", theirs, ours
    yield "bytes of a row of linear-attention state", {*source.units}, {*wanted.units}


def _aux(prefill: Row, decode: Row) -> Iterator[Difference]:
    """Compare metadata rows: SGLang sends prefill's length (`send_aux`, both backends)."""
    here, there = decode.aux_item_lens, prefill.aux_item_lens
    if here == there:
        return
    severity, consequence = Severity.COLD, "the drafter starts without its hidden state"
    if len(here) != len(there) or any(p > d for p, d in zip(there, here, strict=True)):
        severity, consequence = Severity.REFUSED, "metadata of other requests would be overwritten"
    remedy = "Enable speculation, --disaggregation-enable-kv-checksum and sampling masks on both "
    remedy += "sides or on neither"
    sizes = str(list(there)), str(list(here))
    yield Difference(severity, "bytes of the metadata rows", *sizes, consequence, remedy)


NO_DRAFTER = "drafter with KV heads"
# a field of DraftFacts, its name in messages, and the consequence of a difference
_COMPARED = (
    ("architecture", "drafter architecture", "it is a different model"),
    ("algorithm", "speculative algorithm", "the drafter's rows mean something else"),
    ("total_heads", "KV heads of the drafter", "heads would be cut at wrong offsets"),
    ("head_bytes", "bytes per token and head of the drafter", "layers or head sizes differ"),
    ("dtype", "dtype of the drafter's KV", "its numbers would be read as a different type"),
)


def _draft(prefill: Row, decode: Row) -> Iterator[Difference]:
    here, there = decode.draft, prefill.draft
    if here is None:
        return
    if there is None:
        remedy = "Start prefill with the same --speculative-draft-model-path"
        yield Difference(
            Severity.COLD, NO_DRAFTER, "none", here.facts.architecture, "its KV is missing", remedy
        )
        return
    left, right = (row.staging.data_plane if row.staging else "none" for row in (prefill, decode))
    if left != right:
        remedy = "Set the same SGLANG_MIXKV_DATA_PLANE on both sides"
        yield _refused("data plane", left, right, "draft KV could not be read", remedy)
    remedy = "Start both sides with the same drafter and draft KV dtype"
    for field, what, consequence in _COMPARED:
        left, right = getattr(there.facts, field), getattr(here.facts, field)
        if left != right:
            yield Difference(Severity.MISMATCH, what, str(left), str(right), consequence, remedy)
    if prefill.topk != decode.topk:
        what, sizes = "--speculative-eagle-topk", (str(prefill.topk), str(decode.topk))
        consequence = "the top-k rows that travel with each request differ"
        remedy = "Use one value on both sides"
        yield Difference(Severity.MISMATCH, what, *sizes, consequence, remedy)
