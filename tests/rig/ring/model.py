"""The expected bytes of transfers: unsharded caches, split over ranks as SGLang does.

This module uses none of the plugin's own layouts, routes or plans.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rig.ring.special import Shared, Special

BACKEND = "mooncake"
"""SGLang's transfer backend for cases that do not specify one."""


@dataclass(frozen=True)
class Cache:
    """One model's KV cache. `kind`: `mla` has one latent row of `k_bytes` per token and layer;
    `mha` has K and V rows of `heads` heads, of `k_bytes` and `v_bytes` each. `dtype`: bf16, fp8, or
    torch's name. `index_k`: for DSA (mla with pages of 64), whether each layer has index keys; a
    layer that uses an earlier layer's top-k has no index keys."""

    kind: str
    layers: int = 1
    heads: int = 1
    k_bytes: int = 8
    v_bytes: int = 8
    dtype: str = "bf16"
    index_k: tuple[bool, ...] = ()

    @property
    def is_mla(self) -> bool:
        return self.kind == "mla"

    def widths(self) -> list[int]:
        """Return the bytes per token and head, per entry: K of every layer, then V of every
        layer."""
        if self.is_mla:
            return [self.k_bytes] * self.layers
        return [self.k_bytes] * self.layers + [self.v_bytes] * self.layers


@dataclass(frozen=True)
class Request:
    """A request for `tokens` tokens after a prefix of `prefix_pages` that decode has cached, sent
    in chunks of `chunk_pages` (0: one chunk)."""

    tokens: int
    prefix_pages: int = 0
    chunk_pages: int = 0


@dataclass(frozen=True)
class Case:
    """Identical prefill servers, one decode server, and requests, distributed round-robin over the
    prefill servers."""

    prefill_tp: int
    decode_tp: int
    target: Cache = Cache("mla", layers=2, k_bytes=24)
    draft: Cache | None = Cache("mha", layers=1, heads=4)
    algorithm: str = "EAGLE3"  # SGLang's --speculative-algorithm, if there is a drafter
    requests: tuple[Request, ...] = (Request(23), Request(8, chunk_pages=1))
    page_size: int = 4
    prefill_dp: int = 1
    decode_dp: int = 1
    prefill_pp: int = 1
    prefills: int = 1
    prefill_dcp: int = 1
    dcp: int = 1  # the DCP size of decode
    shuffled: bool = True
    hybrid: bool = False  # pools publish layer ids, and there is linear-attention state
    draft_window: int = 0  # number of last tokens whose draft rows are read; 0 for all
    target_window: int = 0  # the target has one more layer, with this window, in an SWAKVPool
    backend: str = field(default_factory=lambda: BACKEND)
    prefill_mixkv: bool = True
    decode_mixkv: bool = True
    seed: int = 0
    rounds: tuple[tuple[int, ...], ...] = ()  # request numbers; one round after the other
    special: Special = field(default_factory=Special, hash=False)
    shared: Shared = field(default_factory=Shared, hash=False, compare=False)

    def cache(self, name: str) -> Cache | None:
        """Return the named cache. SGLang sends the target's sliding-window layers (`window`) and
        index keys (`... index`) by page as well, but as state."""
        if name == "window":
            return replace(self.target, layers=1)
        cache = self.target if name.startswith("target") else self.draft
        if name.endswith(" index"):
            assert cache is not None
            return Cache("mla", layers=sum(cache.index_k), k_bytes=INDEX_K_BYTES)
        return cache

    def prefill_of(self, number: int) -> int:
        return number % self.prefills

    def turn(self, number: int) -> int:
        """Return a request's number within its prefill server, which determines the DP ranks."""
        return number // self.prefills

    def all_rounds(self) -> tuple[tuple[int, ...], ...]:
        return self.rounds or (tuple(range(len(self.requests))),)

    def dcp_of(self, side: str) -> int:
        return self.prefill_dcp if side == "prefill" else self.dcp

    def pages(self, request: Request, dcp: int = 1) -> int:
        """Return a request's number of pages on a side with this DCP size."""
        return -(-request.tokens // (self.page_size * dcp))

    @property
    def by_token(self) -> bool:
        """Return whether `send` gets the number of tokens of a chunk, as from SGLang's schedulers.
        Otherwise, whole pages are sent. SGLang's own transfer needs the number only between
        different DCP sizes."""
        return self.prefill_dcp != self.dcp or (self.prefill_mixkv and self.decode_mixkv)

    @property
    def pool_pages(self) -> int:
        surplus = 2 * len(self.requests) if self.special.surplus else 0
        return sum(self.pages(r) + r.prefix_pages for r in self.requests) + surplus + 5


def heads_of_rank(heads: int, tp: int, rank: int) -> slice:
    """Return the KV heads on a rank by the rule of SGLang's QKVParallelLinear (layers/linear.py),
    which test_loading_rule.py checks."""
    if tp >= heads:
        first = rank // (tp // heads)
        return slice(first, first + 1)
    return slice(rank * (heads // tp), (rank + 1) * (heads // tp))


NAMES = ("target", "draft", "window", "target index", "draft index")
INDEX_K_BYTES = 132  # per token: 128 in fp8, and a scale


def whole(case: Case, name: str, cache: Cache, request: int) -> list[np.ndarray]:
    """Return one request's unsharded rows: per entry [pages, page_size, heads, bytes]."""
    rng = np.random.default_rng([case.seed, request, NAMES.index(name)])
    pages = case.pages(case.requests[request])
    heads = 1 if cache.is_mla else cache.heads
    return [
        rng.integers(0, 256, (pages, case.page_size, heads, width), np.uint8)
        for width in cache.widths()
    ]


def cut(cache: Cache, entries: list[np.ndarray], tp: int, rank: int) -> list[np.ndarray]:
    """Return the part of the rows that belongs to a rank at this TP size."""
    if cache.is_mla:
        return entries
    return [entry[:, :, heads_of_rank(cache.heads, tp, rank)] for entry in entries]


def on_dcp_rank(entry: np.ndarray, dcp: int, rank: int | None) -> np.ndarray:
    """Arrange a request's rows [pages, page_size, ...] in the pages of a server with `dcp` ranks,
    padded with zeros. A rank has every dcp-th token of the target (layers/dcp/layout.py), and all
    tokens of the drafter (`rank` None)."""
    pages, page_size, *rest = entry.shape
    there = -(-pages // dcp)
    tokens = np.zeros((there * dcp * page_size, *rest), entry.dtype)
    tokens[: pages * page_size] = entry.reshape(-1, *rest)
    held = tokens if rank is None else tokens[rank::dcp]
    return held.reshape(there, -1, *rest)


def sglang_pool(
    case: Case, cache: Cache, tp: int, rank: int, layers: int, first_layer: int = 0, dcp: int = 1
) -> Any:
    """Make the KV pool that SGLang's model runner builds for these layers of a cache on one rank.

    `dcp`: for a drafter, the server's DCP size, by which its pages are larger
    (mem_cache/kv_cache_configurator.py, pool_page_size)."""
    import torch
    from sglang.srt.mem_cache.memory_pool import (
        DSATokenToKVPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    names = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
    dtype = getattr(torch, names.get(cache.dtype, cache.dtype))
    page_size = case.page_size * dcp
    size = (case.pool_pages - 1) * page_size  # SGLang adds one page in front
    common = {
        "size": size, "page_size": page_size, "dtype": dtype,
        "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip
    if cache.is_mla:
        width = cache.k_bytes // dtype.itemsize
        common |= {"kv_lora_rank": width - 1, "qk_rope_head_dim": 1, "layer_num": layers}
        if not cache.index_k:
            return MLATokenToKVPool(**common)
        has_keys = cache.index_k[first_layer : first_layer + layers]
        return DSATokenToKVPool(
            index_head_dim=128, kv_cache_dim=width,
            skip_topk_layers=[not has for has in has_keys], **common,
        )  # fmt: skip
    common |= {
        "head_num": len(range(cache.heads)[heads_of_rank(cache.heads, tp, rank)]),
        "head_dim": cache.k_bytes // dtype.itemsize,
        "v_head_dim": cache.v_bytes // dtype.itemsize,
    }
    if case.target_window and cache is case.target:
        return SWAKVPool(
            size_swa=size, full_attention_layer_ids=[*range(layers)],
            swa_attention_layer_ids=[layers], **common,
        )  # fmt: skip
    return MHATokenToKVPool(layer_num=layers, **common)


def hybrid_pool(case: Case, full: Any, tp: int, layers: range) -> Any:
    """Make the pool around `full` that SGLang builds for a model with full and linear attention,
    with one state slot per request. Odd layers have full attention, even ones linear."""
    import torch
    from sglang.srt.configs.mamba_utils import (
        Mamba2CacheParams,
        Mamba2StateDType,
        Mamba2StateShape,
    )
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

    heads, linear = STATE_HEADS // tp, [2 * layer for layer in layers]
    shape = Mamba2StateShape(
        conv=[(heads, 3)], temporal=(heads, 2, 2), intermediate_size=heads, conv_dim=heads,
        ssm_state_size=2, num_heads=heads, head_dim=2, state_size=2, conv_kernel=4,
    )  # fmt: skip
    state_dtype = getattr(torch, case.special.state_dtype)
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=state_dtype)
    params = Mamba2CacheParams(shape=shape, dtype=dtype, layers=linear)
    state = MambaPool(
        size=len(case.requests), spec_state_size=0, cache_params=params,
        mamba_layer_ids=linear, device="cpu",
    )  # fmt: skip
    return HybridLinearKVPool(
        size=full.size, dtype=full.dtype, page_size=case.page_size, head_num=heads, head_dim=2,
        full_attention_layer_ids=[layer + 1 for layer in linear], device="cpu",
        mamba_pool=state, full_kv_pool=full, use_mla=case.target.is_mla,
        use_dsa=bool(case.target.index_k),
    )  # fmt: skip


def state_of(case: Case, pool: Any) -> dict[tuple[int, int], np.ndarray]:
    """Return a hybrid pool's state, by (tensor, layer): [slots, heads on rank, bytes]."""
    ids, dims = pool.get_state_layer_ids(), pool.get_state_dim_per_tensor()
    found = {}
    for index, (ptr, length) in enumerate(zip(*pool.get_state_buf_infos()[:2], strict=True)):
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(ptr))
        key = index // len(set(ids)), ids[index]
        found[key] = memory.reshape(len(case.requests) + 1, dims[index], -1)
    return found


def entries_of(
    case: Case, pool: Any, cache: Cache, tp: int, rank: int, dcp: int = 1
) -> list[np.ndarray]:
    """Return the pool's buffers as bytes, per entry [pages, page_size, heads, bytes]."""
    import torch

    buffers = pool.kv_buffer if cache.is_mla else [*pool.k_buffer, *pool.v_buffer]
    local = 1 if cache.is_mla else len(range(cache.heads)[heads_of_rank(cache.heads, tp, rank)])
    shape = (case.pool_pages, case.page_size * dcp, local, -1)
    return [b.view(torch.uint8).numpy().reshape(shape) for b in buffers]


def index_entries_of(case: Case, pool: Any) -> list[np.ndarray]:
    """Return the index keys of the layers that have them, in the shape of `entries_of`."""
    shape = (case.pool_pages, case.page_size, 1, INDEX_K_BYTES)
    return [b.numpy().reshape(shape) for b in pool.index_k_with_scale_buffer if len(b)]


def canary(seed: list[int], shape: tuple[int, ...]) -> np.ndarray:
    """Return random bytes that no transfer may touch."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def page_tables(case: Case, side: str, pool: int = 0) -> list[np.ndarray]:
    """Return each request's pages on that side, which are the same on all its ranks.

    `pool` 1 is the pool of the target's sliding-window layers, which has its own page numbers."""
    sizes = [case.pages(r, case.dcp_of(side)) for r in case.requests]
    order, ends = _page_order(case, side, pool), np.cumsum(sizes)
    return [order[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def surplus_pages(case: Case, side: str, number: int) -> np.ndarray:
    """Return a request's pages after its prompt on that side. Their number is in `Special.surplus`,
    and is 0 to 2."""
    first = sum(case.pages(r, case.dcp_of(side)) for r in case.requests) + 2 * number
    count = case.special.surplus.get(side, 0)
    return _page_order(case, side)[first : first + count]


def _page_order(case: Case, side: str, pool: int = 0) -> np.ndarray:
    seed = [case.seed, side == "decode"]
    rng = np.random.default_rng([*seed, pool] if pool else seed)
    order = rng.permutation(case.pool_pages) if case.shuffled else np.arange(case.pool_pages)
    return order.astype(np.int32)


def draft_bytes(case: Case) -> int:
    """Return the draft bytes that all decode ranks need, counting each head on each rank once."""
    if case.draft is None or case.draft.is_mla:
        return 0  # SGLang moves the rows of an MLA drafter
    per_rank = len(range(case.draft.heads)[heads_of_rank(case.draft.heads, case.decode_tp, 0)])
    size = 1 if case.by_token else case.page_size * case.prefill_dcp
    tokens = sum(-(-r.tokens // size) * size for r in case.requests)
    left_out = sum(draft_start(case, number) for number in range(len(case.requests)))
    tokens -= left_out * case.page_size * case.dcp
    return tokens * per_rank * case.decode_tp * sum(case.draft.widths())


def window_start(case: Case, request: int) -> int:
    """Return the first page that the target's window reaches (prefill.py, _swa_payload)."""
    return max(0, case.requests[request].tokens - case.target_window) // case.page_size


def draft_start(case: Case, request: int) -> int:
    """Return the first draft page that decode requests. Decode assumes that the last page has a
    single token, places the window before that token, and rounds down to a page."""
    if not case.draft_window:
        return 0
    size = case.page_size * case.dcp
    last = (case.pages(case.requests[request], case.dcp) - 1) * size
    return max(0, last - case.draft_window) // size


def state_rows(
    case: Case, request: int, key: tuple[int, int], width: int, tp: int, rank: int
) -> np.ndarray:
    """Return a rank's part of one of a request's state tensors, [heads on rank, width].

    SGLang splits Mamba states by TP rank in dimension 0 of the per-slot tensor."""
    rng = np.random.default_rng([case.seed, request, 77, *key])
    rows = rng.integers(0, 256, (STATE_HEADS, width), np.uint8)
    per_rank = STATE_HEADS // tp
    return rows[rank * per_rank : (rank + 1) * per_rank]


STATE_HEADS = 16
