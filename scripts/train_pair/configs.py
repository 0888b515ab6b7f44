"""The config.json of every model; SGLang and the training code read the same ones."""

from __future__ import annotations

from typing import Any

from task import BOS, MASK, PAD, SEP, VOCAB

Config = dict[str, Any]

AUX_LAYERS = (2, 3, 4)
"""The drafter's features are the residual stream at the input of these target layers."""

BLOCK = 4
"""Tokens of a DFLASH block: one that is known, and the drafts."""

_SHARED: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 64,
    "hidden_act": "silu",
    "head_dim": 16,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": SEP,
    "pad_token_id": PAD,
    "dtype": "bfloat16",
}

MLA: Config = {
    **_SHARED,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_interleave": True,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "first_k_dense_replace": 4,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "ep_size": 1,
    "pretraining_tp": 1,
    "num_nextn_predict_layers": 1,
}

GQA: Config = {
    **_SHARED,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "mlp_bias": False,
}

TARGETS: dict[str, Config] = {"mla": MLA, "gqa": GQA}

DRAFT_KV_HEADS = {"mla": 4, "gqa": 8}
"""KV heads of each target's drafter. Next to the GQA target (4) it needs another number: its
cells are then not where the target's head geometry says."""

MARKOV_RANK = 16
"""Of DSPARK's head that adds what the token before says of the next one."""


def drafter(target: str) -> Config:
    """The EAGLE3 drafter of a target. SGLang adds 1 to each id of a feature layer."""
    return {
        **_SHARED,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": DRAFT_KV_HEADS[target],
        "draft_vocab_size": VOCAB,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in AUX_LAYERS],
        },
    }


def dflash(target: str) -> Config:
    """The DFLASH drafter of a target. SGLang adds 1 to each id of a feature layer."""
    return {
        **_SHARED,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_key_value_heads": DRAFT_KV_HEADS[target],
        "block_size": BLOCK,
        "num_target_layers": TARGETS[target]["num_hidden_layers"],
        "dflash_config": {
            "target_layer_ids": [layer - 1 for layer in AUX_LAYERS],
            "mask_token_id": MASK,
        },
    }


def dspark(target: str) -> Config:
    """The same drafter for DSPARK, whose block size counts the drafts alone."""
    return {
        **dflash(target),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": BLOCK - 1,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "sample_from_anchor": False,
        "enable_confidence_head": False,
    }
