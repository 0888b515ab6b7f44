"""Two servers with what SGLang makes of their flags, once it knows the target.

Restated from SGLang 0.5.23's srt/arg_groups/; the functions are named below. All that the plan
compares, it compares of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_mixkv.tools.plan_flags import Server, about
from sglang_mixkv.tools.plan_model import Config, architecture, target_config, text_of

# Targets among those of is_deepseek_dsa (configs/model_config.py).
_DSA = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "Glm5NextForConditionalGeneration",
    "LongcatFlashForCausalLM",
    "Dots3NoteForCausalLM",
    "HYV4ForCausalLM",
)
# Those of _deepseek_family_overrides (model_overrides/deepseek_v2.py).
_FAMILY = (*_DSA, "KimiK25ForConditionalGeneration")
_DSA_DTYPES = ("bfloat16", "fp8_e4m3")


@dataclass(frozen=True)
class _Target:
    """A target, as far as it decides flags."""

    name: str
    text: Config

    @property
    def is_dsa(self) -> bool:
        """Whether its attention is DeepSeek's sparse one, of V3.2 and others."""
        return self.name in _DSA and self.text.get("index_topk") is not None

    @property
    def is_v4(self) -> bool:
        return self.name == "DeepseekV4ForCausalLM"

    @property
    def splits_prompts_over_all_ranks(self) -> bool:
        """Whether --enable-prefill-cp sets --attn-cp-size."""
        mla = self.name in _FAMILY and bool(self.text.get("kv_lora_rank"))
        return mla or self.is_dsa or self.is_v4


def resolved(prefill: Server, decode: Server) -> tuple[Server, Server, list[str]]:
    """Both servers, and what is not known of them. Raises MixKVError."""
    servers = [_by_target(prefill), _by_target(decode)]
    said = [server.args.kv_cache_dtype for server in servers]
    dtype = next((each for each in said if each in _DSA_DTYPES), "bfloat16")
    points = []
    for number, server in enumerate(servers):
        if _gpu_decides_dtype(server):
            servers[number] = server.with_args(kv_cache_dtype=dtype)
            points.append(
                f"{server.role}: --kv-cache-dtype auto with sparse attention (index_topk): SGLang "
                f"takes fp8_e4m3 on a Blackwell GPU, bfloat16 on an older one; planned as {dtype}. "
                "Set it on both sides"
            )
    return servers[0], servers[1], points


def _by_target(server: Server) -> Server:
    target = _target(server)
    return server.with_args(
        **_context_parallelism(server, target),
        page_size=_page_size(server, target),
        kv_cache_dtype=_kv_cache_dtype(server, target),
    )


def _gpu_decides_dtype(server: Server) -> bool:
    """overrides.py, _dsa_kv_cache_dtype_default."""
    return server.args.kv_cache_dtype == "auto" and _target(server).is_dsa


def _target(server: Server) -> _Target:
    with about(server.role):
        config = target_config(server)
    return _Target(architecture(config), text_of(config))


def _context_parallelism(server: Server, target: _Target) -> dict[str, Any]:
    """deepseek_v2.py, _deepseek_family_overrides, and deepseek_v4_hook.py,
    validate_deepseek_v4_cp: plain data parallelism becomes DP-attention as well."""
    args, groups = server.args, server.dp_groups * server.replicas
    if not args.enable_prefill_cp or not target.splits_prompts_over_all_ranks:
        return {}
    if groups < 1 or (server.dp_groups > 1 and server.replicas > 1):
        return {}  # refused
    own = target.is_dsa and args.cp_strategy == "interleave" and args.attn_cp_size > 1
    width = args.attn_cp_size if own else max(1, args.tp_size // groups)
    return {"attn_dp_size": groups, "dp_size": 1, "attn_cp_size": width}


def _page_size(server: Server, target: _Target) -> int | None:
    """deepseek_v2.py, _deepseek_family_overrides, and deepseek_v4.py, _deepseek_v4_overrides, on
    CUDA; --page-size does not count there."""
    if target.is_dsa:
        return 64 * (target.text.get("index_kpool") or 1)
    given: int | None = server.args.page_size
    return 256 if target.is_v4 else given


def _kv_cache_dtype(server: Server, target: _Target) -> str:
    """overrides.py, _dsa_kv_cache_dtype_default and _deepseek_v4_kv_cache_dtype, as far as the GPU
    does not decide."""
    asked = str(server.args.kv_cache_dtype)
    if target.is_v4:
        return "fp8_e4m3" if asked == "auto" else asked
    with_sinks = asked == "auto" and target.text.get("learnable_sink")
    return "bfloat16" if target.is_dsa and (asked == "bf16" or with_sinks) else asked
