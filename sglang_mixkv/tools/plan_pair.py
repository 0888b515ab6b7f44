"""The plan of a pair as a value: whether it needs the plugin, and what goes wrong.

What stock SGLang 0.5.23 does: beside an MLA target, each decode rank gets one prefill rank's draft
rows as they are, which is right if both hold the same heads. Mooncake writes them at prefill's row
length (send_kvcache), NIXL page by page (_prep_equal_tp_dlist). A target with KV heads is cut by
heads, and its drafter at the same byte offsets (send_kvcache_slice). With --dcp-size, Mooncake's
send_kvcache_dcp cuts by heads, except beside pure MLA, but sends from one prefill rank only; NIXL's
prefill compares decode's draft rows with its own (prepare_dcp_token_item_lens), and its thread
ends if they differ.
tests/protocol/test_stock.py tests these cases.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec

from sglang_mixkv import __version__, refusals
from sglang_mixkv.channel.handshake import Row
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode.compare import Difference, Severity, differences
from sglang_mixkv.draft import layout
from sglang_mixkv.draft.layout import DraftLayout
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_model import Model
from sglang_mixkv.tools.plan_server import Server

SCHEMA = 9


class Need(msgspec.Struct, frozen=True):
    """`wrong_share`: how much of decode's draft KV is wrong without the plugin; None if unknown."""

    needed: bool
    reason: str
    wrong_share: float | None = 0.0


class PairReport(msgspec.Struct, frozen=True):
    """`need`: None if nothing serves the pair. `findings`: what is refused or goes wrong."""

    need: Need | None
    prefill: Server
    decode: Server
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    schema: int = SCHEMA


def make_plan(prefill: Server, decode: Server) -> PairReport:
    """Make the plan of a pair, with all findings at once."""
    found = _differences(prefill, decode)
    of_target = [f"[MIXKV-PAIR-03] {one}" for one in found if one.what.startswith(_TARGETS)]
    no_route = [*_no_route(prefill, decode)] or of_target or [*_asked_of_sglang(prefill, decode)]
    need = None if no_route else need_of(prefill, decode)
    others = (f"[MIXKV-PAIR-03] {one}" for one in found)
    findings = dict.fromkeys((*_findings(prefill, decode, need), *no_route, *others))
    notes = dict.fromkeys(_notes(prefill, decode, need))
    return PairReport(need, prefill, decode, tuple(findings), tuple(notes))


def need_of(prefill: Server, decode: Server) -> Need:
    """Return whether a pair in which one attention-TP size divides the other needs the plugin."""
    need = _need_to_move(prefill, decode)
    is_shared = prefill.store is not None and prefill.store == decode.store
    is_cut = prefill.attention_tp != decode.attention_tp and not decode.target.kv_heads
    if need.needed or not (is_shared and is_cut and decode.facts) or _has("_is_tp_sharded_sidecar"):
        return need
    text = "in Mooncake's store, which both use, draft heads are named by the rank, not by the size"
    return Need(True, text, None)


def _need_to_move(prefill: Server, decode: Server) -> Need:
    sizes = theirs, ours = prefill.attention_tp, decode.attention_tp
    if prefill.draft is None or decode.draft is None:
        without = [side.role for side in (prefill, decode) if side.draft is None]
        return Need(False, f"no draft KV is moved without a drafter on {' and '.join(without)}")
    heads = decode.draft.kv_heads
    if not heads:
        return Need(False, "the drafter is MLA, so each rank has the same rows")
    if theirs == ours:
        return Need(False, f"both sides have attention TP {ours}")
    if decode.target.kv_heads:
        if all(_row_bytes(decode.target, tp) == _row_bytes(decode.draft, tp) for tp in sizes):
            return Need(False, "SGLang cuts the drafter's KV by heads exactly as the target's")
        return Need(True, "SGLang cuts the drafter's rows by the target rows' length", None)
    if heads <= min(sizes):
        return Need(False, f"each rank holds one KV head of the drafter's {heads}")
    held, needed = (max(1, heads // tp) for tp in sizes)
    is_nixl = decode.disaggregation_transfer_backend == "nixl"
    if decode.dcp_size > 1 and is_nixl:
        text = "over NIXL with --dcp-size, prefill's bootstrap thread dies on a drafter "
        return Need(True, text + "that decode cuts differently: requests hang", None)
    if decode.dcp_size > 1 and not decode.target.hybrid:
        return Need(True, "with --dcp-size, SGLang cuts no heads beside this target", None)
    if decode.dcp_size > 1 and (held >= needed or _has("_is_extra_hybrid_mla_replica")):
        return Need(False, "with --dcp-size, SGLang cuts the drafter's heads itself")
    if decode.dcp_size > 1:
        text = f"SGLang sends {held} of the {needed} KV heads a decode rank needs"
        return Need(True, text, 1 - held / needed)
    if not is_nixl and _has("send_draft_heads"):
        return Need(False, "this SGLang moves the drafter's heads itself")
    text = f"a decode rank holds {needed} of the drafter's KV heads, and SGLang "
    if held < needed:
        right = held / needed / (decode.page_size or 1) if is_nixl else 0
        return Need(True, f"{text}fills it from one prefill rank, which holds {held}", 1 - right)
    if is_nixl:
        return Need(True, f"{text}does not send it rows of {held}: requests fail", None)
    text += f"writes rows of {held} into it, over other requests' rows and past the end of the pool"
    return Need(True, text, 1.0)


def _has(method: str) -> bool:
    """Return whether SGLang has a method that a patch of upstream/ adds."""
    return any(f"def {method}(" in _source(file) for file in _PATCHED)


_CONN = "disaggregation/common/conn.py"
_PATCHED = _CONN, "disaggregation/mooncake/conn.py", "mem_cache/hicache_storage.py"


@cache
def _source(file: str) -> str:
    """Read a file of SGLang's srt/; "" without SGLang. An import would take as long as a plan."""
    found = find_spec("sglang")
    if found is None or found.origin is None:
        return ""
    return (Path(found.origin).parent / "srt" / file).read_text()


def _row_bytes(model: Model, tp: int) -> set[int]:
    return {width * max(1, model.kv_heads // tp) for width in model.facts.head_bytes}


def _no_route(prefill: Server, decode: Server) -> Iterator[str]:
    """Yield the sizes, of attention TP or of a drafter's heads, between which no route exists."""
    try:
        layout.readers_of(prefill.attention_tp, decode.attention_tp)
    except MixKVError as error:
        yield str(error)
    for side in (prefill, decode):
        try:
            if side.facts is not None and side.attention_tp:
                layout.heads_on_rank(side.facts.total_heads, side.attention_tp, 0)
        except MixKVError as error:
            yield str(error.about(side.role))


def _asked_of_sglang(prefill: Server, decode: Server) -> Iterator[str]:
    """Run SGLang's own check of a pair, without the problems that _findings reports itself."""
    if not _source(_CONN):
        return
    none, target = {"kv_layout": None, "dsv41_spec_layout": None}, decode.target
    published = msgspec.structs.asdict(prefill) | prefill.target.met | {
        "attn_tp_size": prefill.attention_tp, "page_size": None, "kv_cache_dtype": None,
        "follow_bootstrap_room": True, "dp_size": 1,
    }  # fmt: skip
    answer = SimpleNamespace(status_code=200)
    sglang = _check_of_sglang(SimpleNamespace(get=lambda *_, **__: answer))
    names = {field.name for field in fields(sglang["PrefillServerInfo"])} & published.keys()
    answer.json = lambda: {name: published[name] for name in names}
    manager = type("Decode", (), {one: sglang[one] for one in _OF_MANAGER})()
    vars(manager).update(none | msgspec.structs.asdict(decode) | target.met | {
        "attn_tp_size": decode.attention_tp, "attn_cp_rank": 0, "pp_rank": 0,
        "is_mla_backend": not (target.kv_heads or target.hybrid), "kv_cache_dtype_str": "",
        "is_hybrid_mla_backend": not target.kv_heads and target.hybrid, "prefill_info_table": {},
        "enable_all_cp_ranks_for_transfer": False, "kv_args": SimpleNamespace(
            page_size=0, engine_rank=0, state_types=[*map(sglang["StateType"], target.states)]),
    })  # fmt: skip
    try:
        if not manager.try_ensure_parallel_info("prefill"):  # SGLang logs why, and asks again
            text = f"the check that SGLang {decode.sglang} makes of a pair does not run in plan"
            yield f"{text}: SGLang may refuse this pair. Report it with both lines."
    except (AssertionError, RuntimeError, ValueError) as error:
        yield f"SGLang refuses the pair when it meets: {error}"


_OF_MANAGER = "try_ensure_parallel_info", "_resolve_rank_mapping"


def _check_of_sglang(requests: Any) -> dict[str, Any]:
    """Compile SGLang's check of a pair from SGLang's source, with only the classes that it uses."""
    used = "StateType", "PrefillServerInfo", *_OF_MANAGER
    nodes = ast.walk(ast.parse(_source("disaggregation/base/conn.py") + _source(_CONN)))
    wanted: list[ast.stmt] = [
        node
        for node in nodes
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in used
    ]
    names: dict[str, Any] = {"__name__": __name__, "dataclasses": dataclasses, "enum": enum,
                             "logger": Mock(), "requests": requests}  # fmt: skip
    flags = annotations.compiler_flag
    exec(compile(ast.Module(wanted, []), "conn.py", "exec", flags, dont_inherit=True), names)
    return names


def _findings(prefill: Server, decode: Server, need: Need | None) -> Iterator[str]:
    """List what SGLang refuses, what the plugin refuses (if set or needed), and other faults."""
    is_needed = need is not None and need.needed
    for server in (prefill, decode):
        yield from server.stock
        if server.enabled or is_needed:
            yield from server.refused
        if server.mode != server.role:
            text = f"expected --disaggregation-mode {server.role}; got {server.mode}"
            is_both = prefill.mode == decode.mode
            hint = "Both lines have the same" if is_both else "Are the two launch lines swapped?"
            yield f"[MIXKV-START-03] {server.role}: {text}. {hint}"
    on = [side.role for side in (prefill, decode) if side.enabled]
    if len(on) == 1:
        both = "both" if is_needed else "both, or on neither if no other pair needs it"
        yield f"[MIXKV-PAIR-01] --enable-mixkv: only on {on[0]}. Set it on {both}."
    elif not on and is_needed and not (prefill.refused or decode.refused):
        yield "[MIXKV-PAIR-01] --enable-mixkv: on neither side, and the pair needs it."
    if prefill.dp_size > 1:  # CommonKVSender.__init__ in common/conn.py: DP rank 0 for each
        text = "replicas (--dp-size without DP attention), SGLang fails requests of all but one"
        yield f"prefill: of {prefill.dp_size} {text}. Start each as its own server."
    if prefill.tcp and _is_cut(prefill, decode):
        yield f"{_TCP}. Use RDMA, NIXL or one attention-TP size."
    if prefill.resolved and decode.resolved:
        for name in ("page_size", "kv_cache_dtype", "disaggregation_enable_kv_checksum"):
            sides = getattr(prefill, name), getattr(decode, name)
            why = "metadata rows differ" if "checksum" in name else "SGLang refuses the pair"
            yield from _differ(f"--{name.replace('_', '-')}", *sides, why)
        if prefill.kv_cache_dtype == decode.kv_cache_dtype:  # all that SGLang compares
            types = prefill.target.facts.dtype, decode.target.facts.dtype
            yield from _differ("dtype of the target's KV", *types, "its numbers would be misread")
    yield from _models(prefill, decode)


_TARGETS = "target", "pipeline stages", "--dcp-size"
_TCP = "over Mooncake's TCP, this target's chunks of about 2,048+ tokens fail at unequal sizes"


def _is_cut(prefill: Server, decode: Server) -> bool:
    """Return whether SGLang sends the target's heads one by one over Mooncake."""
    is_mooncake = prefill.disaggregation_transfer_backend == "mooncake"
    is_unequal = prefill.attention_tp != decode.attention_tp
    return bool(is_mooncake and is_unequal and prefill.target.kv_heads)


def _differences(prefill: Server, decode: Server) -> list[Difference]:
    """List the differences for which the servers would refuse each other."""
    is_cold = decode.config.on_draft_mismatch == "cold"
    served = {Severity.COLD, Severity.MISMATCH} if is_cold else {Severity.COLD}
    # Unset top-k: SGLang stopped before it set it, or one side does not speculate.
    topks = [side.speculative_eagle_topk or 0 for side in (prefill, decode)]
    rows = list[Row]()  # what the ranks would publish, without facts of running ranks
    for side, topk in zip((prefill, decode), topks if all(topks) else (0, 0), strict=True):
        tp, backend = side.attention_tp or 1, side.disaggregation_transfer_backend
        of_rank = side.sglang, bytes(8), "", 0, "", tp, 0, 0, ()
        draft = DraftLayout(side.facts, tp, 0) if side.facts else None
        rows.append(Row(PROTOCOL, __version__, *of_rank, backend, side.stage, topk, draft))
    return [one for one in differences(*rows) if one.severity not in served]


def _models(prefill: Server, decode: Server) -> Iterator[str]:
    """Find faults of the models that the servers do not look for."""
    for side in (prefill, decode):
        if facts := side.draft and side.draft.facts:
            words = refusals.other_head(facts.architecture, facts.algorithm)
            yield from [f"{side.role}: {words}"] if words else []
    yield from _differ("target", prefill.target, decode.target, "its KV would be in wrong rows")
    here, there = (str(side.draft or "none") for side in (prefill, decode))
    if prefill.draft and here != there and None in (prefill.facts, decode.facts):
        yield from _differ("drafter", here, there, "its KV cannot be moved")
    elif decode.draft and not decode.draft.kv_heads and decode.target.kv_heads:
        text = "an MLA drafter beside a target with KV heads. Use one with KV heads."
        yield f"[MIXKV-START-05] {text}"


def _differ(what: str, prefill: object, decode: object, why: str) -> Iterator[str]:
    sides = str(prefill), str(decode)
    if sides[0] != sides[1]:
        found = Difference(Severity.REFUSED, what, *sides, why, "Give both sides the same")
        yield f"[MIXKV-PAIR-03] {found}"


def _notes(prefill: Server, decode: Server, need: Need | None) -> Iterator[str]:
    yield from (*prefill.notes, *decode.notes)
    if (here := sglang_version()) != decode.sglang:
        yield f"SGLang's check of a pair was taken from SGLang {here}, not {decode.sglang}"
    for gpu in dict.fromkeys(filter(None, (prefill.gpu, decode.gpu))):
        roles = " and ".join(side.role for side in (prefill, decode) if side.gpu == gpu)
        yield f"{roles}: resolved for a {gpu.title()} GPU (--gpu)"
    if not prefill.tcp and _is_cut(prefill, decode):
        yield f"{_TCP}; over RDMA and NIXL they do not"
    if need and not need.needed and prefill.enabled and decode.enabled:
        cost = f", and costs {decode.config.staging_mb} MiB a rank and two draft KV copies"
        text = "drop it on both sides, unless another pair with one of these servers needs it"
        yield f"--enable-mixkv is of no use here{cost if decode.facts else ''}: {text}"
    if prefill.draft is None and decode.draft is not None:
        yield "only decode speculates, so drafters start cold: give prefill the same flags for it"
    if decode.draft is not None and decode.draft.window is not None:
        yield f"draft window: only the last {decode.draft.window:,} tokens' draft KV is moved"
