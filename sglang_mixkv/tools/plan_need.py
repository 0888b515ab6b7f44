"""Whether SGLang 0.5.23 alone moves the drafter's KV right between two servers.

Beside an MLA target each decode rank gets the rows of one prefill rank as they lie there, which is
right where both hold the same heads. Mooncake writes them at prefill's row length (send_kvcache),
NIXL page by page (_prep_equal_tp_dlist). A target with KV heads is cut by heads, and its drafter at
the same bytes (send_kvcache_slice). tests/protocol/test_stock.py runs these cases.
"""

from __future__ import annotations

import msgspec

from sglang_mixkv.tools.plan_server import Model, Server


class Need(msgspec.Struct, frozen=True):
    """`wrong_share`: of a prompt's draft KV on decode, without the plugin. None where requests
    fail, or where it depends on the rows."""

    needed: bool
    reason: str
    wrong_share: float | None = 0.0


def need_of(prefill: Server, decode: Server) -> Need:
    """Of attention-TP sizes of which one divides the other."""
    sizes = theirs, ours = prefill.attention_tp, decode.attention_tp
    if prefill.draft is None or decode.draft is None:
        without = [side.role for side in (prefill, decode) if side.draft is None]
        return Need(False, f"no draft KV is moved without a drafter on {' and '.join(without)}")
    heads = decode.draft.kv_heads
    if not heads:
        return Need(False, "the drafter is MLA, so each rank has the same rows")
    if theirs == ours:
        return Need(False, f"both sides have attention TP {ours}")
    if heads <= min(sizes):
        return Need(False, f"no rank holds more than one of the drafter's {heads} KV heads")
    if decode.target.kv_heads:
        if all(_row_bytes(decode.target, tp) == _row_bytes(decode.draft, tp) for tp in sizes):
            return Need(False, "the drafter's rows are cut by heads as the target's, and as long")
        text = "SGLang cuts the drafter's rows where it cuts the target's, of another length"
        return Need(True, text, None)
    held, needed = (max(1, heads // tp) for tp in sizes)
    if decode.dcp_size > 1:
        return _with_dcp(held, needed, hybrid=decode.target.hybrid)
    return _as_they_lie(held, needed, decode)


def _row_bytes(model: Model, tp: int) -> set[int]:
    return {width * max(1, model.kv_heads // tp) for width in model.head_bytes}


def _as_they_lie(held: int, needed: int, decode: Server) -> Need:
    is_nixl = decode.disaggregation_transfer_backend == "nixl"
    text = f"a decode rank holds {needed} of the drafter's KV heads, and SGLang "
    if held < needed:
        right = held / needed / (decode.page_size or 1) if is_nixl else 0
        return Need(True, f"{text}fills it from one prefill rank, which holds {held}", 1 - right)
    if is_nixl:
        return Need(True, f"{text}does not send it rows of {held}: requests fail", None)
    text += f"sends it rows of {held}, over other rows and beyond the pool, where requests fail"
    return Need(True, text, 1.0)


def _with_dcp(held: int, needed: int, *, hybrid: bool) -> Need:
    """send_kvcache_dcp cuts by heads, but sends from one prefill rank, and not beside pure MLA."""
    if not hybrid:
        return Need(True, "with --dcp-size SGLang cuts no heads beside this target", None)
    if held < needed:
        text = f"of {needed} KV heads that a decode rank needs SGLang sends {held}"
        return Need(True, text, 1 - held / needed)
    return Need(False, "with --dcp-size SGLang cuts the drafter's heads itself")
