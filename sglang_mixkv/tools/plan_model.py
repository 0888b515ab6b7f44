"""What a token of a model's KV cache looks like, read from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_mixkv.errors import MixKVError, refuse
from sglang_mixkv.kv.layout import Kind, Spread
from sglang_mixkv.tools.plan_flags import Server, about

Config = dict[str, Any]

# Bytes an element. SGLang turns float32 checkpoints into float16 (configs/model_config.py).
DTYPE_BYTES = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}

# A DSPARK drafter inside of a checkpoint (sglang: dspark_config.py).
_BUNDLED = tuple(f"dspark_{k}" for k in ("block_size", "markov_rank", "noise_token_id"))

_HEAD_KEYS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")


@dataclass(frozen=True)
class Cache:
    """One model's KV cache. `widths`: elements per token and head, one each for K and V, or the
    latent row alone for MLA. `state`: none, replicated or sharded (by TP rank), beside KV."""

    architecture: str
    spread: Spread
    layers: int
    widths: tuple[int, ...]
    dtype: str
    state: str = "none"

    def head_bytes(self, layers: int) -> tuple[int, ...]:
        """Bytes per token and head, per entry: K of these layers, then V; MLA has one each."""
        size = DTYPE_BYTES[self.dtype]
        return tuple(width * size for width in self.widths for _ in range(layers))


def read_config(role: str, path: str | None, flag: str) -> Config:
    """A model folder's config.json. Raises MixKVError unless it is a local folder."""
    if not path:
        raise MixKVError("MIXKV-START-04", f"{flag} is missing on the launch line.")
    file = Path(path, "config.json")
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise MixKVError(
            "MIXKV-START-04",
            f"{flag} {path}: {error}. The plan reads config.json from a local folder and "
            f"downloads nothing: give the folder, beside a URL as --{role} '{flag} FOLDER'.",
        ) from None
    if not isinstance(found, dict):
        raise MixKVError("MIXKV-START-04", f"{file}: expected a JSON object.")
    return found


def caches(server: Server) -> tuple[Cache, Cache | None, list[str]]:
    """The target's cache, the drafter's, None without one, and what the models leave open."""
    with about(server.role):
        target, points = _target_cache(server)
        draft, draft_points = _draft_cache(server)
    return target, draft, [*points, *draft_points]


def target_config(server: Server) -> Config:
    """The target's config.json. Raises MixKVError."""
    return read_config(server.role, server.args.model_path, "--model-path")


def _target_cache(server: Server) -> tuple[Cache, list[str]]:
    config = target_config(server)
    text = text_of(config)
    layers, others, open_points = _attention_layers(text)
    state = "sharded" if others else "replicated" if text.get("index_topk") else "none"
    dtype = _kv_dtype(server, config, server.args.kv_cache_dtype)
    open_points += _dtype_doubts(config, server.args.kv_cache_dtype, "target")
    if text.get("index_topk"):
        open_points.append(
            "target: sparse attention (index_topk): its indexer state, and scales that some "
            "backends keep beside fp8 rows, are not counted"
        )
    return _cache(architecture(config), text, layers, dtype, state), open_points


def _draft_cache(server: Server) -> tuple[Cache | None, list[str]]:
    if not server.has_drafter:
        return None, []
    path = _draft_path(server)
    inside = path == server.args.model_path
    config = read_config(server.role, path, "--speculative-draft-model-path")
    text = text_of(config)
    if inside and server.algorithm == "DSPARK":
        if not any(config.get(key) is not None for key in _BUNDLED):
            raise MixKVError(
                "MIXKV-START-04",
                "--speculative-draft-model-path is missing on the launch line, and the target's "
                "folder holds no DSPARK drafter: SGLang would not start it.",
            )
        return None, [
            "drafter: inside the target's checkpoint, without KV entries of its own: its state "
            "goes as SGLang sends it, and is not counted"
        ]
    layers = _number(text, "num_nextn_predict_layers" if inside else "num_hidden_layers")
    asked = server.args.speculative_draft_kv_cache_dtype or server.args.kv_cache_dtype
    name = architecture(config) + (" (next-token layers)" if inside else "")
    doubts = _dtype_doubts(config, asked, "drafter")
    return _cache(name, text, layers, _kv_dtype(server, config, asked), "none"), doubts


def _draft_path(server: Server) -> str | None:
    """The folder that SGLang takes: without a flag DSPARK looks for one inside of the target's
    (speculative_hook.py, _target_checkpoint_dspark_subfolder)."""
    path, target = server.args.speculative_draft_model_path, server.args.model_path
    if path is None and server.algorithm == "DSPARK":
        inner = Path(target or "", "dspark")
        return str(inner) if (inner / "config.json").is_file() else target
    return path or target


def architecture(config: Config) -> str:
    return str((config.get("architectures") or ["unknown"])[0])


def text_of(config: Config) -> Config:
    """The language model's part of a multimodal configuration."""
    inner = config.get("text_config")
    return {**inner, "architectures": config.get("architectures")} if inner else config


def _cache(name: str, text: Config, layers: int, dtype: str, state: str) -> Cache:
    if text.get("kv_lora_rank") and not name.startswith("Llama"):
        row = text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0)
        return Cache(name, Spread(Kind.MLA), layers, (row,), dtype, state)
    heads = _number(text, "num_attention_heads")
    total = next((text[key] for key in _HEAD_KEYS if text.get(key)), heads)
    width = text.get("head_dim") or _number(text, "hidden_size") // heads
    value = text.get("v_head_dim") or width
    return Cache(name, Spread(Kind.MHA, total), layers, (width, value), dtype, state)


def _number(text: Config, key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        told = f"config.json: expected a positive number as {key}; got {value!r}."
        raise MixKVError("MIXKV-START-04", told)
    return value


def _attention_layers(text: Config) -> tuple[int, bool, list[str]]:
    """Layers with KV, whether there are others with state, and what is not known."""
    linear = text.get("linear_attn_config") or {}
    if linear.get("full_attn_layers"):
        return len(linear["full_attn_layers"]), True, []
    kinds = text.get("layer_types") or text.get("layers_block_type") or []
    full = sum("full_attention" in kind or kind == "attention" for kind in kinds)
    if kinds and full < len(kinds):
        point = "target: not all layers are full attention; the others travel as state, not counted"
        return full, True, [point]
    layers = _number(text, "num_hidden_layers")
    if text.get("full_attention_interval"):
        return layers // int(text["full_attention_interval"]), True, []
    return layers, False, []


def _kv_dtype(server: Server, config: Config, asked: str) -> str:
    """Element type of KV rows. Raises MixKVError for one whose rows carry more than elements."""
    if asked != "auto":
        if asked not in DTYPE_BYTES:
            raise refuse(
                "MIXKV-START-04",
                f"a KV cache dtype among {sorted(DTYPE_BYTES)}",
                asked,
                "bytes per token would be guessed",
                "Plan with another --kv-cache-dtype; this says nothing about running it",
            )
        return asked
    if server.args.dtype != "auto":
        return str(server.args.dtype)
    text = text_of(config)
    found = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "")
    found = (found or str(text.get("torch_dtype") or "bfloat16")).removeprefix("torch.")
    return "float16" if found == "float32" else found


def _dtype_doubts(config: Config, asked: str, name: str) -> list[str]:
    if asked == "auto" and _quantizes_kv(config.get("quantization_config") or {}):
        return [f"{name}: the checkpoint may ask for a quantized KV cache; planned unquantized"]
    return []


def _quantizes_kv(quantization: Config) -> bool:
    """Whether a key for the KV cache, here or in a section, has a value."""
    return any(
        bool(value) if "kv_cache" in key else isinstance(value, dict) and _quantizes_kv(value)
        for key, value in quantization.items()
    )
