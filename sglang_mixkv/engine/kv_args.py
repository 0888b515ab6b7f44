"""From SGLang's KV args to the pure part's geometry.

The contract on KV args, whoever builds them (SGLang through the plugin, a test, a tool):

    num_draft_entries           the last so many entries of kv_data_* are the drafter's
    is_draft_mla_backend        the drafter's pool is MLA
    draft_kv_head_num           the drafter's KV heads on this rank
    draft_total_kv_head_num     of the whole drafter, from its configuration
    kv_head_num, total_kv_head_num    the same of the target, where it is not MLA
    draft_architecture          optional, for the handshake
    draft_window                optional: the window that both sides have to agree on
    draft_windows               optional: how far this server reads of each of its entries
                                (engine/draft_window.py); draft_window of all, where it is missing
    custom_mem_pool             optional: the torch.cuda.MemPool that the target's KV lies in
"""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.utils import is_mla_backend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import (
    attention_backends,
    get_parallel,
    get_server_args,
    get_spec,
)

from sglang_mixkv.engine.draft_window import draft_windows, keeps_to_it
from sglang_mixkv.engine.kv_memory import custom_mem_pool
from sglang_mixkv.errors import refuse
from sglang_mixkv.kv.layout import Caches, Component, Kind, Shard, Spread


def describe(kv_args: Any, target_pool: Any, draft_pool: Any | None) -> None:
    """Add to KV args what SGLang's lack. After utils.setup_state_kv_args, on both sides.

    Raises MixKVError for pools whose rows this plugin cannot cut; the server then does
    not start.
    """
    kv_args.custom_mem_pool = custom_mem_pool(target_pool)
    if not is_mla_backend(target_pool) and not kv_args.is_hybrid_mla_backend:
        _describe_target_heads(kv_args, target_pool)
    if draft_pool is not None:
        _check_is_sent_whole(kv_args, draft_pool)
    if draft_pool is None or not kv_args.num_draft_entries:
        return
    if getattr(kv_args, "mla_compression_ratios", None):
        raise refuse(
            "MIXKV-START-05",
            "a target with KV entries in the order of its layers",
            "DeepSeek-V4's, ordered by compression ratio, and a drafter with token KV",
            "entries of several pipeline stages would be paired wrongly",
            "Use DeepSeek-V4's own NextN drafter, or start both sides without --enable-mixkv",
        )
    draft_pool = getattr(draft_pool, "full_kv_pool", draft_pool)
    _check_dcp(kv_args, target_pool, draft_pool)
    spec = get_spec()
    config = ModelConfig.from_server_args(
        get_server_args(),
        model_path=spec.speculative_draft_model_path,
        model_revision=spec.speculative_draft_model_revision,
        is_draft_model=True,
    )
    kv_args.draft_architecture = config.hf_config.architectures[0]
    kv_args.is_draft_mla_backend = is_mla_backend(draft_pool)
    of_a_layer = 1 if kv_args.is_draft_mla_backend else 2  # K of all layers, then V of all
    windows = of_a_layer * draft_windows(
        spec.speculative_algorithm, kv_args.draft_architecture, config.hf_config,
        spec.speculative_draft_window_size, kv_args.num_draft_entries // of_a_layer,
    )  # fmt: skip
    own = spec.speculative_draft_attention_backend
    backends = (own,) if own else attention_backends()
    kept = keeps_to_it(spec.speculative_algorithm, backends, spec.speculative_eagle_topk)
    kv_args.draft_window = max(windows)
    kv_args.draft_windows = windows if kept else (0,) * len(windows)
    if not kv_args.is_draft_mla_backend:
        _check_layout("draft", draft_pool)
        kv_args.draft_kv_head_num = draft_pool.head_num
        kv_args.draft_total_kv_head_num = config.get_total_num_kv_heads()


def _describe_target_heads(kv_args: Any, pool: Any) -> None:
    """SGLang sets these on prefill, and on decode only with its staging buffer."""
    pool = getattr(pool, "full_kv_pool", pool)
    if getattr(kv_args, "total_kv_head_num", 0) or not hasattr(pool, "head_num"):
        return
    config = ModelConfig.from_server_args(get_server_args())
    kv_args.kv_head_num = pool.head_num
    kv_args.total_kv_head_num = config.get_total_num_kv_heads()


def _check_is_sent_whole(kv_args: Any, pool: Any) -> None:
    """Refuse a drafter of which KV args hold a part only: setup_state_kv_args adds what is not
    in kv_data_* for the target's pool alone (but for DeepSeek-V4, DSA and QSA drafters)."""
    scales = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    if isinstance(pool, SWAKVPool):
        raise refuse(
            "MIXKV-START-05",
            "a drafter whose layers share one group of pages",
            f"{type(pool).__name__}: its sliding-window layers have pages of their own",
            "SGLang 0.5.23 would never send the KV of those layers",
            "Use a drafter without such layers, or --speculative-draft-window-size",
        )
    if any(getattr(pool, name, None) is not None for name in scales):
        raise refuse(
            "MIXKV-START-05",
            "a drafter's KV that needs no scales beside it",
            f"{type(pool).__name__} with block scales",
            "SGLang 0.5.23 would never send its scales",
            "Give --speculative-draft-kv-cache-dtype bfloat16 or fp8_e4m3",
        )
    sent = {ptr for ptrs in kv_args.state_data_ptrs for ptr in ptrs}
    index_keys = getattr(getattr(pool, "full_kv_pool", pool), "index_k_with_scale_buffer", ())
    if any(len(keys) and keys.data_ptr() not in sent for keys in index_keys):
        raise refuse(
            "MIXKV-START-05",
            "a drafter whose index keys are sent with the target's",
            f"{type(pool).__name__} beside a target without them, or with linear attention",
            "SGLang 0.5.23 would never send them, and the accept length would be low",
            "Use a drafter without DSA",
        )


def _check_dcp(kv_args: Any, target_pool: Any, draft_pool: Any) -> None:
    """Refuse what is not known beside decode context parallelism."""
    dcp = get_parallel().attn_dcp_size or 1
    if dcp == 1:
        return
    kinds = sorted({str(kind.value) for kind in kv_args.state_types} - {"mamba"})
    if kinds:
        raise refuse(
            "MIXKV-START-05",
            "an MLA target without other state than linear attention's, with --dcp-size above 1",
            f"state {kinds}",
            "it could land in other pages",
            "Use --dcp-size 1",
        )
    if draft_pool.page_size != target_pool.page_size * dcp:
        raise refuse(
            "MIXKV-START-05",
            f"a drafter with pages of {target_pool.page_size * dcp} tokens, the target's times "
            f"--dcp-size {dcp}",
            f"pages of {draft_pool.page_size}",
            "its rows would be cut at wrong offsets",
            "Use --dcp-size 1",
        )


def _check_layout(name: str, pool: Any) -> None:
    layout = getattr(pool, "kv_cache_layout", None)
    if layout != "nhd" or not hasattr(pool, "head_num"):
        raise refuse(
            "MIXKV-START-05",
            f"a {name} KV pool with pages of [tokens, heads, head size] (NHD)",
            f"{type(pool).__name__} with layout {layout}",
            "heads could not be cut out of its rows",
            "Unset SGLANG_USE_HND_KVCACHE, or use another attention backend",
        )


def target_spread(kv_args: Any, is_mla: bool, attn_tp: int) -> Spread:
    """Kind and heads of the target. Heads as stock's send_kvcache_slice resolves them."""
    if is_mla or getattr(kv_args, "is_hybrid_mla_backend", False):
        return Spread(Kind.MLA)
    total = getattr(kv_args, "total_kv_head_num", 0) or 0
    return Spread(Kind.MHA, total or getattr(kv_args, "kv_head_num", 0) * attn_tp)


def draft_spread(kv_args: Any) -> Spread | None:
    """Kind and heads of the drafter, None without one. Raises MixKVError when unknown."""
    if not kv_args.num_draft_entries:
        return None
    if getattr(kv_args, "is_draft_mla_backend", False):
        return Spread(Kind.MLA)
    total = getattr(kv_args, "draft_total_kv_head_num", 0) or 0
    if total <= 0:
        raise refuse(
            "MIXKV-START-05",
            "KV args with draft_total_kv_head_num, the KV heads of the whole drafter",
            f"{kv_args.num_draft_entries} draft entries without it",
            "the drafter's rows could not be cut",
            "Set is_draft_mla_backend, draft_kv_head_num and draft_total_kv_head_num",
        )
    return Spread(Kind.MHA, total)


def windows_of(kv_args: Any) -> tuple[int, ...]:
    """How many tokens before the prompt's end decode reads of each draft entry, 0: all."""
    one = getattr(kv_args, "draft_window", 0)
    return getattr(kv_args, "draft_windows", ()) or (one,) * kv_args.num_draft_entries


def caches(
    kv_args: Any, is_mla: bool, attn_tp: int, windows: tuple[int, ...] = (), dcp: int = 1
) -> Caches:
    """This rank's geometry; `windows`: of the drafter's entries; `dcp`: decode context parallelism,
    of which the drafter has no part: its pages are so many times as large as the target's. Raises
    MixKVError where entries do not split into heads."""
    rank = kv_args.engine_rank % attn_tp
    first = len(kv_args.kv_data_ptrs) - kv_args.num_draft_entries
    target = Shard(
        Component(
            target_spread(kv_args, is_mla, attn_tp),
            tuple(kv_args.kv_item_lens[:first]),
            tuple(kv_args.kv_data_lens[:first]),
        ),
        kv_args.page_size,
        attn_tp,
        rank,
    )
    ptrs = tuple(kv_args.kv_data_ptrs)
    spread = draft_spread(kv_args)
    if spread is None:
        return Caches(target, ptrs)
    draft = Shard(
        Component(
            spread,
            tuple(kv_args.kv_item_lens[first:]),
            tuple(kv_args.kv_data_lens[first:]),
            windows,
        ),
        kv_args.page_size * dcp,
        attn_tp,
        rank,
    )
    target.check("target")
    draft.check("draft")
    _check_heads_on_rank(kv_args, draft)
    return Caches(target, ptrs[:first], draft, ptrs[first:])


def _check_heads_on_rank(kv_args: Any, draft: Shard) -> None:
    local = getattr(kv_args, "draft_kv_head_num", 0)
    if draft.component.spread.kind is Kind.MHA and local and local != len(draft.heads):
        raise refuse(
            "MIXKV-START-05",
            f"{len(draft.heads)} of the drafter's {draft.component.spread.total_heads} KV heads "
            f"on rank {draft.rank} of {draft.tp}",
            f"a pool with {local}",
            "its rows would be cut at wrong offsets",
            "Report this drafter: its heads are spread in another way",
        )
