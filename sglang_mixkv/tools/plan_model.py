"""A model on a launch line, as SGLang reads its config.json."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec

from sglang_mixkv.channel.handshake import Target
from sglang_mixkv.draft.layout import DraftFacts
from sglang_mixkv.draft.window import window_of
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.tools.plan_shell import unreadable


class Facts(DraftFacts, frozen=True):
    """Facts without the bounds of messages. `total_heads`: 0 if ranks have the same rows (MLA)."""

    architecture: str
    algorithm: str
    total_heads: int
    head_bytes: tuple[int, ...]
    dtype: str


class Model(msgspec.Struct, frozen=True):
    """`hybrid`: some layers have a state instead of KV. `window`: how far back a drafter reads.
    `states`: those that SGLang does not cut by heads. `met`: more values that SGLang compares."""

    facts: Facts
    layers: int
    hybrid: bool = False
    window: int | None = None
    states: tuple[str, ...] = ()
    met: dict[str, Any] = {}

    @property
    def kv_heads(self) -> int:
        return self.facts.total_heads

    def __str__(self) -> str:
        heads = f"{self.kv_heads} KV head{'s' * (self.kv_heads > 1)}" if self.kv_heads else "MLA"
        return f"{self.facts.architecture} ({heads}, {self.layers} layer{'s' * (self.layers > 1)})"


def stage_of(target: Model, view: Any) -> Target:
    from sglang.srt.distributed.utils import get_pp_indices

    first, end = get_pp_indices(target.layers, 0, view.pp_size)
    sizes, is_even = (view.pp_size, view.dcp_size), len(set(target.facts.head_bytes)) <= 1
    return Target(target.kv_heads, 2 * (end - first), target.hybrid, is_even, *sizes, target.states)


def model_of(server_args: Any, view: Any, *, is_draft: bool) -> Model:
    """Read a server's target or drafter. Raises MixKVError if SGLang cannot read config.json."""
    from sglang.srt.configs import model_config
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_executor.model_runner_components import layer_setup
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    path = (view.speculative_draft_model_path if is_draft else None) or view.model_path
    revision = view.speculative_draft_model_revision if is_draft else None
    try:
        config = model_config.ModelConfig.from_server_args(
            server_args, model_path=path, model_revision=revision, is_draft_model=is_draft
        )
    except Exception as error:  # from SGLang, transformers or the model's own code
        words = " ".join(str(error).split())
        if (kind := re.search(r"model type `\w+`", words)) or "`model_type` key" in words:
            words = f"SGLang {sglang_version()} has no loader for {kind[0] if kind else 'it'}. If "
            words += "it has another engine's format, e.g. speculators': convert it to SGLang's"
        raise unreadable(f"{path}: {words.rstrip('.')}") from None
    layers = layer_setup._compute_model_num_layers(
        model=None, model_config=config, is_draft_worker=is_draft
    )
    algorithm = SpeculativeAlgorithm.from_string(view.speculative_algorithm)
    dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=view.kv_cache_dtype,
        model=None,
        model_dtype=config.dtype,
        is_draft_worker=is_draft,
        is_dflash=algorithm.is_dflash_family(),
        speculative_draft_attention_backend=view.speculative_draft_attention_backend,
        speculative_draft_kv_cache_dtype=view.speculative_draft_kv_cache_dtype,
    )[1]
    is_v4 = model_config.is_deepseek_v4(config.hf_config)
    alike = config.attention_arch == model_config.AttentionArch.MLA or is_v4
    widths = [] if alike else [config.head_dim, config.v_head_dim]
    facts = Facts(
        config.hf_config.architectures[0],
        view.speculative_algorithm or "" if is_draft else "",
        0 if alike else config.get_total_num_kv_heads(),
        tuple(width * dtype.itemsize for width in widths for _ in range(layers)),
        str(dtype).removeprefix("torch."),
    )
    window = window_of(view, config.hf_config) if is_draft else None
    states = {
        "minimax_index_k": model_config.is_minimax_sparse(config.hf_config),
        "block_scale": view.kv_cache_dtype == "mxfp8",
        "swa": config.is_hybrid_swa,
    }
    met = dict[str, Any]()
    if is_v4:  # get_pd_kv_layout and get_dsv41_spec_layout in disaggregation/utils.py
        is_wide = view.dsv4_attn_backend == "trtllm"
        met["kv_layout"] = f"trtllm's {is_wide}, {os.environ.get('SGLANG_DSV4_KV_LAYOUT')}"
        ratios = getattr(config.hf_text_config, "compress_ratios", None) or ()
        if 2 in ratios and algorithm.is_dspark():
            met["dsv41_spec_layout"] = {"num_draft_tokens": view.speculative_num_draft_tokens}
    return Model(
        facts, layers, bool(mambaish_config(config)), window,
        () if alike or is_draft else tuple(name for name, has in states.items() if has), met,
    )  # fmt: skip
