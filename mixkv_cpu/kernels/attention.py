"""Attention over the paged KV cache, one request at a time, in float32.

H query heads share Hk KV heads (H a multiple of Hk; MLA in its absorbed form has Hk = 1);
D and Dv are the widths of keys and values. Positional signatures as in SGLang's
``intel_amx_backend.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_CACHE = "Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale"
_TABLE = "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens"
_RULE = "float sm_scale, float logit_cap, bool is_cross, int window, Tensor? encoder_lens"
_DECODE = (
    f"(Tensor q, {_CACHE}, Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor attn_logits,"
    f" {_TABLE}, {_RULE}, Tensor? sinks) -> ()"
)
_EXTEND = (
    f"(Tensor q, Tensor? k, Tensor? v, Tensor(c!) o, {_CACHE}, {_TABLE}, Tensor extend_lens,"
    f" Tensor extend_start, int max_extend_len, {_RULE}, Tensor? sinks, Tensor? tree_mask,"
    " bool is_causal) -> ()"
)

# SGLang modules look up these operators when they are imported (`sglang.srt.models.qwen3_5`, which
# Dynamo imports; checked on 0.5.22 and 0.5.23). They have no implementation: a call fails.
_NAMES = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def register_operators() -> None:
    """Register both kernels as ``torch.ops.sgl_kernel`` operators; call this once per process."""
    for name in _NAMES:
        torch.library.define(f"sgl_kernel::{name}", "(Tensor x) -> ()")
    for kernel, schema in ((decode_attention_cpu, _DECODE), (extend_attention_cpu, _EXTEND)):
        name = f"sgl_kernel::{kernel.__name__}"
        torch.library.define(name, schema)
        torch.library.impl(name, "cpu", kernel)


def _refuse(**unsupported: Any) -> None:
    """Raise NotImplementedError for an option that these kernels would ignore."""
    asked = [name for name, value in unsupported.items() if value not in (None, False)]
    if asked:
        raise NotImplementedError(f"sgl_kernel stand-in: attention with {', '.join(asked)}")


def _visible(queries: int, keys: int, window: int, causal: bool) -> Tensor | None:
    """Return which keys the last ``queries`` positions see, [queries, keys]; None for all keys."""
    if not causal:
        return None
    ones = torch.ones(queries, keys, dtype=torch.bool)
    seen = ones.tril(keys - queries)
    return seen & ~ones.tril(keys - queries - window) if window > 0 else seen


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """Map q [n, H, D], k [m, Hk, D] and v [m, Hk, Dv] to [n, H, Dv] in float32."""
    grouped = q.float().reshape(len(q), k.shape[1], -1, q.shape[2])
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, k.float()) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hgnm,mhv->nhgv", scores.softmax(-1), v.float()).flatten(1, 2)


def _heads(x: Tensor, width: int) -> Tensor:
    """Reshape [n, ...] to [n, heads, width], also for n = 0."""
    return x.reshape(len(x), math.prod(x.shape[1:]) // width, width)


def _gather(cache: Tensor, slots: Tensor, new: Tensor | None, width: int) -> Tensor:
    """Return a request's rows: cached rows, followed by ``new`` if it is given. Without a cached
    prefix, ``new`` may have another shape than cached rows, since MLA computes a prompt with full
    heads but caches latents.
    """
    if new is None:
        return _heads(cache[slots], width)
    stored = slots[: len(slots) - len(new)]
    rows = _heads(new, width)
    return torch.cat([_heads(cache[stored], width), rows]) if len(stored) else rows


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    extend_start: Tensor,
    max_extend_len: int,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Fill ``o`` [tokens, H, Dv] for the last ``extend_lens[b]`` positions of each request.

    Their keys and values come from ``k`` and ``v``, or from the cache if these are None. The keys
    and values of earlier positions come from the cache. ``window``: keys that a query sees; 0 for
    all.

    DP attention pads ``q`` and ``req_pool_indices`` past the batch that the lengths describe.
    The padded rows of ``o`` become zero.
    """
    scaled = k_scale != 1 or v_scale != 1
    _refuse(cross_attention=is_cross, kv_scale=scaled, logit_cap=logit_cap, sinks=sinks)
    _refuse(tree_mask=tree_mask)
    rows = req_pool_indices[: len(seq_lens)]
    spans = zip(*(x.tolist() for x in (rows, seq_lens, extend_lens, extend_start)), strict=True)
    o[int(extend_lens.sum()) :] = 0
    for row, seq_len, length, start in spans:
        new = slice(start, start + length)
        slots = req_to_token[row, :seq_len].long()
        keys = _gather(k_cache, slots, None if k is None else k[new], q.shape[2])
        values = _gather(v_cache, slots, None if v is None else v[new], o.shape[2])
        seen = _visible(length, seq_len, window, is_causal)
        o[new] = _attend(q[new], keys, values, sm_scale, seen).to(o.dtype)


def _store(cache: Tensor, loc: Tensor, x: Tensor) -> None:
    """Write one row per request into the cache."""
    cache[loc] = x.reshape(len(loc), *cache.shape[1:]).to(cache.dtype)


def decode_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Store the new keys and values at ``loc``; fill ``o`` [bs, H, Dv] for one query per request.

    With MLA, ``v_cache`` is a view of ``k_cache``, so storing the keys stores the values.
    """
    scaled = k_scale != 1 or v_scale != 1
    _refuse(cross_attention=is_cross, kv_scale=scaled, logit_cap=logit_cap, sinks=sinks)
    if k is not None and v is not None:
        _store(k_cache, loc.long(), k)
        if v_cache.data_ptr() != k_cache.data_ptr():
            _store(v_cache, loc.long(), v)
    for i, (row, seq_len) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        first = max(0, seq_len - window) if window > 0 else 0
        slots = req_to_token[row, first:seq_len].long()
        keys, values = _heads(k_cache[slots], q.shape[2]), _heads(v_cache[slots], o.shape[2])
        one = slice(i, i + 1)
        o[one] = _attend(q[one], keys, values, sm_scale, None).to(o.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Return the slot table of the draft steps, [bs, pool_len], with a row per request.

    With topk 1, drafts follow the committed tokens, so the rows are those of ``req_to_token``.
    """
    if topk != 1:
        raise NotImplementedError(f"sgl_kernel stand-in: drafting with topk {topk}")
    return req_to_token[req_pool_indices.long(), :pool_len]
