"""Targets in plain PyTorch: DeepSeek-V3-shaped (MLA, one MoE layer) and Llama-shaped (GQA).

Shapes: B rows, T positions, x [B, T, hidden]. ``state_dict()`` is the checkpoint.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from configs import AUX_LAYERS, Config
from layers import Mlp, RmsNorm, inverse_frequencies, linear, rotate_halves, rotate_neighbours
from torch import Tensor, nn


def yarn_frequencies(config: Config) -> Tensor:
    """[qk_rope_head_dim / 2]: inverse frequencies, slow ones stretched by the yarn factor."""
    yarn, width, base = config["rope_scaling"], config["qk_rope_head_dim"], config["rope_theta"]

    def pair_with(turns: int) -> float:
        wave = yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return width * math.log(wave) / (2 * math.log(base))

    low = max(math.floor(pair_with(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_with(yarn["beta_slow"])), width - 1)
    ramp = (torch.arange(width // 2).float() - low) / max(high - low, 1e-3)
    kept = 1 - ramp.clamp(0, 1)
    plain = base ** (torch.arange(0, width, 2, dtype=torch.float) / width)
    return (1 / (yarn["factor"] * plain)) * (1 - kept) + (1 / plain) * kept


class MlaAttention(nn.Module):
    """Multi-head latent attention: keys and values come from one latent of kv_lora_rank."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, heads, rank = config["hidden_size"], config["num_attention_heads"], config
        self.heads, self.rank = heads, config["kv_lora_rank"]
        self.nope, self.rope = rank["qk_nope_head_dim"], rank["qk_rope_head_dim"]
        self.value = config["v_head_dim"]
        self.q_a_proj = linear(width, config["q_lora_rank"])
        self.q_a_layernorm = RmsNorm(config["q_lora_rank"])
        self.q_b_proj = linear(config["q_lora_rank"], heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(width, self.rank + self.rope)
        self.kv_a_layernorm = RmsNorm(self.rank)
        self.kv_b_proj = linear(self.rank, heads * (self.nope + self.value))
        self.o_proj = linear(heads * self.value, width)
        yarn = config["rope_scaling"]
        stretch = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1.0
        self.scale = (self.nope + self.rope) ** -0.5 * stretch * stretch

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, heads * d] -> [B, heads, T, d]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self._split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self._split(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k_nope, v = kv.split([self.nope, self.value], -1)
        k_rope = rotate_neighbours(k_rope, cos, sin)[:, None].expand(-1, self.heads, -1, -1)
        q = torch.cat([q_nope, rotate_neighbours(q_rope, cos, sin)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        v = F.pad(v, (0, self.nope + self.rope - self.value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.o_proj(out[..., : self.value].transpose(1, 2).flatten(2))


class GqaAttention(nn.Module):
    """Grouped-query attention: several query heads share one KV head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.group = heads // kv_heads
        self.q_proj = linear(width, heads * self.head_dim)
        self.k_proj = linear(width, kv_heads * self.head_dim)
        self.v_proj = linear(width, kv_heads * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, width)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, heads * head_dim] -> [B, heads, T, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate_halves(self._split(self.q_proj(x)), cos, sin)
        k = rotate_halves(self._split(self.k_proj(x)), cos, sin)
        k, v = (y.repeat_interleave(self.group, 1) for y in (k, self._split(self.v_proj(x))))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Gate(nn.Module):
    """The router's parameters; the correction bias stays zero."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        experts = config["n_routed_experts"]
        self.weight = nn.Parameter(torch.zeros(experts, config["hidden_size"]))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Moe(nn.Module):
    """Experts in groups: the best groups first, then the best experts in them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Mlp(width, inner) for _ in range(config["n_routed_experts"]))
        self.shared_experts = Mlp(width, inner * config["n_shared_experts"])

    def _chosen(self, scores: Tensor) -> Tensor:
        """[B, T, experts] -> indices [B, T, num_experts_per_tok]."""
        groups = scores.unflatten(-1, (self.config["n_group"], -1))
        best = groups.topk(2, -1)[0].sum(-1).topk(self.config["topk_group"], -1)[1]
        allowed = torch.zeros(groups.shape[:-1]).scatter(-1, best, 1.0)[..., None].bool()
        return (
            groups.masked_fill(~allowed, float("-inf"))
            .flatten(-2)
            .topk(self.config["num_experts_per_tok"], -1)[1]
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.gate.weight).sigmoid()
        chosen = self._chosen(scores.detach() + self.gate.e_score_correction_bias)
        weights = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = self.shared_experts(x)
        for index, expert in enumerate(self.experts):
            out = out + weights[..., index : index + 1] * expert(x)
        return out


class Layer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        is_mla = "kv_lora_rank" in config
        self.self_attn = MlaAttention(config) if is_mla else GqaAttention(config)
        is_dense = index < config.get("first_k_dense_replace", config["num_hidden_layers"])
        self.mlp = Mlp(width, config["intermediate_size"]) if is_dense else Moe(config)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(width), RmsNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        count = config["num_hidden_layers"]
        self.layers = nn.ModuleList(Layer(config, index) for index in range(count))
        self.norm = RmsNorm(config["hidden_size"])


class Target(nn.Module):
    """A causal language model that also gives the drafter's features."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = linear(config["hidden_size"], config["vocab_size"])
        frequencies = (
            yarn_frequencies(config)
            if "rope_scaling" in config
            else inverse_frequencies(config["head_dim"], config["rope_theta"])
        )
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> hidden states [B, T, hidden] for the head, features [B, T, 3 * hidden]."""
        angles = torch.arange(ids.shape[1]).float()[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x, features = self.model.embed_tokens(ids), []
        for index, layer in enumerate(self.model.layers):
            if index in AUX_LAYERS:
                features.append(x)
            x = layer(x, cos, sin)
        return self.model.norm(x), torch.cat(features, -1)
