"""This rank's draft KV in SGLang's pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_parallel, get_server_args, get_spec

from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.draft.window import pages_left_out, window_of
from sglang_mixkv.errors import MixKVError, refuse

SCALES = ("k_scale_buffer", "native_k_scale_buffer")


class Draft(NamedTuple):
    """A rank's draft KV. `page_size`: tokens per page, in SGLang's numbering. `mem_pool`: the
    torch.cuda.MemPool that holds the KV, or None. `window`: how many of a prompt's last tokens
    decode reads; None for all."""

    layout: DraftLayout
    rows: DraftRows
    page_size: int
    mem_pool: Any = None
    window: int | None = None

    def in_reach(self, first: int, pages: Any) -> tuple[int, Any]:
        """Return the first token and the pages that decode can read; `pages` begin at `first`."""
        left_out = pages_left_out(len(pages), self.page_size, self.window)
        return first + left_out * self.page_size, pages[left_out:]


def of_pool(pool: Any) -> Draft:
    """Describe the draft KV in SGLang's pool. Raises MixKVError if the pool's rows cannot be split
    by heads, or if it keeps more than these rows."""
    name, kv_layout = type(pool).__name__, getattr(pool, "kv_cache_layout", None)
    if any(getattr(pool, scale, None) is not None for scale in SCALES):
        raise not_whole(f"{name}: its K and V have block scales")
    if kv_layout != "nhd":
        raise _not_cut(f"{name} with layout {kv_layout}")
    config = model_config()
    entries = [*pool.k_buffer, *pool.v_buffer]
    facts = DraftFacts(
        architecture=config.hf_config.architectures[0],
        algorithm=get_spec().speculative_algorithm or "",
        total_heads=config.get_total_num_kv_heads(),
        head_bytes=tuple(e.shape[-1] * e.element_size() for e in entries),
        dtype=str(pool.dtype).removeprefix("torch."),
    )
    parallel = get_parallel()
    layout = DraftLayout(facts, parallel.attn_tp_size, parallel.attn_tp_rank)
    if pool.head_num != len(layout.heads):
        raise _not_cut(
            f"a pool of {pool.head_num} heads where rank {layout.rank} of {layout.tp} should have "
            f"{len(layout.heads)} of {facts.total_heads}"
        )
    rows = DraftRows([e.view(torch.uint8) for e in entries], layout.heads)
    window = window_of(resolved_view(get_server_args()), config.hf_config)
    return Draft(layout, rows, pool.page_size, pool.maybe_get_custom_mem_pool(), window)


def model_config() -> ModelConfig:
    """Return the drafter's model config, since a pool does not show the heads of other ranks."""
    spec = get_spec()
    return ModelConfig.from_server_args(
        get_server_args(),
        model_path=spec.speculative_draft_model_path,
        model_revision=spec.speculative_draft_model_revision,
        is_draft_model=True,
    )


def check_appended(kv_args: Any, is_mla: bool) -> None:
    """Refuse a drafter in SGLang's lists unless the target is MLA. SGLang reads the lists of a
    target with heads as one half K and one half V (disaggregation/common/conn.py,
    get_mha_kv_ptrs_with_pp). A drafter with heads is never in them, since its pool is hidden."""
    count = kv_args.num_draft_entries
    if count and not (is_mla or kv_args.is_hybrid_mla_backend):
        expected = "a drafter with KV heads, which the plugin keeps out of SGLang's lists, or an "
        expected += "MLA drafter for an MLA target"
        got = f"{count} drafter entries after those of a target with heads"
        consequence = "SGLang would pair these with the wrong entries, or fail requests"
        raise refuse("MIXKV-START-05", expected, got, consequence, "Use a drafter with KV heads")


def checked(manager: Any, hidden: Any) -> Any:
    """Return the manager. Refuse it if it moves a hidden pool's buffers, or lacks our mixin."""
    args, buffers = manager.kv_args, (*hidden.k_buffer, *hidden.v_buffer) if hidden else ()
    moved = {*args.kv_data_ptrs, *(one for part in args.state_data_ptrs for one in part)}
    moved &= {one.data_ptr() for one in buffers}
    if moved or (hidden and not hasattr(manager, "local")):
        expected = "the plugin's manager, without draft KV among SGLang's"
        got = f"{type(manager).__qualname__} with {len(moved)} of the drafter's buffers"
        consequence = "draft KV would be moved twice, or not at all"
        remedy = "Switch off what replaces or moves it, or start both sides without --enable-mixkv"
        raise refuse("MIXKV-START-05", expected, got, consequence, remedy)
    return manager


def not_whole(got: str) -> MixKVError:
    expected = "a drafter whose K and V rows are its whole cache"
    consequence = "part of the cache would stay on prefill"
    remedy = "Use a drafter without these, or --speculative-draft-kv-cache-dtype bfloat16"
    return refuse("MIXKV-START-05", expected, got, consequence, remedy)


def _not_cut(got: str) -> MixKVError:
    expected = "a draft KV pool with rows of [tokens, heads, head size] (NHD)"
    consequence = "heads would be cut at wrong offsets"
    remedy = "Unset SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
    return refuse("MIXKV-START-05", expected, got, consequence, remedy)
