"""The DFLASH drafter: two Qwen3 layers that fill a block of masks at once.

A token's KV is projected from the target's features of it, in each layer from the same. A block
is a known token and BLOCK - 1 masks; its tokens see each other and all tokens before the block.
DSPARK's dense drafter is the same, with a head that adds what the token before says of the next.

Shapes: B rows of T tokens, N blocks a row, M = N * BLOCK, x [B, M, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from configs import AUX_LAYERS, BLOCK, Config
from drafter import Damage, damaged
from layers import Mlp, RmsNorm, inverse_frequencies, linear, rotate_halves
from model import Target
from task import MASK, sample
from torch import Tensor, nn


@dataclass(frozen=True)
class Blocks:
    """Blocks in the answers of B rows, and what they see, computed once with the frozen target.

    ``positions``: [B, M]. ``visible``: [B, M, T + M] bool. ``labels``: [B, N, BLOCK - 1].
    ``prompt``: [B, T] bool, tokens whose KV prefill writes.
    """

    features: Tensor
    embeddings: Tensor
    positions: Tensor
    visible: Tensor
    labels: Tensor
    prompt: Tensor


@torch.no_grad()
def blocks(
    target: Target, rows: int, symbols: int, count: int, generator: torch.Generator
) -> Blocks:
    """``count`` blocks a row, each from <sep> or a symbol of the answer on."""
    ids, answer = sample(rows, symbols, symbols, generator)
    length = ids.shape[1]
    first = torch.randint(symbols + 1, length - BLOCK + 1, (rows, count), generator=generator)
    positions = (first[..., None] + torch.arange(BLOCK)).flatten(1)
    tokens = torch.full((rows, count, BLOCK), MASK)
    tokens[..., 0] = ids.gather(1, first)
    before = torch.arange(length) < first.repeat_interleave(BLOCK, 1)[..., None]
    own = torch.block_diag(*[torch.ones(BLOCK, BLOCK)] * count).bool().expand(rows, -1, -1)
    return Blocks(
        features=target(ids)[1],
        embeddings=target.model.embed_tokens(tokens.flatten(1)),
        positions=positions,
        visible=torch.cat([before, own], 2),
        labels=ids.gather(1, positions).view(rows, count, BLOCK)[..., 1:],
        prompt=answer.cumsum(1) == 0,
    )


class Attention(nn.Module):
    """Grouped-query attention with normalised heads, over given KV and the blocks' own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.group = heads // kv_heads
        self.q_proj = linear(width, heads * self.head_dim)
        self.k_proj = linear(width, kv_heads * self.head_dim)
        self.v_proj = linear(width, kv_heads * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, width)
        self.q_norm, self.k_norm = RmsNorm(self.head_dim), RmsNorm(self.head_dim)
        frequencies = inverse_frequencies(self.head_dim, config["rope_theta"])
        self.register_buffer("frequencies", frequencies, persistent=False)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = (positions.float()[..., None] * self.frequencies)[..., None, :]
        return rotate_halves(x, angles.cos(), angles.sin())

    def kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, tokens, kv_heads, head_dim]."""
        k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj)
        )
        return self.rotated(self.k_norm(k), positions), v

    def forward(self, x: Tensor, inputs: Blocks, context_k: Tensor, context_v: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        k, v = self.kv(x, inputs.positions)
        k, v = torch.cat([context_k, k], 1), torch.cat([context_v, v], 1)
        q, k, v = (
            self.rotated(q, inputs.positions).transpose(1, 2),
            k.repeat_interleave(self.group, 2).transpose(1, 2),
            v.repeat_interleave(self.group, 2).transpose(1, 2),
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=inputs.visible[:, None])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.self_attn = Attention(config)
        self.mlp = Mlp(width, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(width), RmsNorm(width)


class BlockDrafter(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.fc = linear(len(AUX_LAYERS) * width, width)
        self.hidden_norm, self.norm = RmsNorm(width), RmsNorm(width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))

    def forward(self, inputs: Blocks, damage: Damage | None = None) -> Tensor:
        """Hidden states [B, N, BLOCK - 1, hidden] of the masks, for the target's head."""
        context = self.hidden_norm(self.fc(inputs.features))
        x = inputs.embeddings
        for layer in self.layers:
            k, v = layer.self_attn.kv(context, torch.arange(context.shape[1]))
            if damage is not None:
                k, v = (damaged(y, inputs.prompt, damage) for y in (k, v))
            x = x + layer.self_attn(layer.input_layernorm(x), inputs, k, v)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (-1, BLOCK))[:, :, 1:]


@torch.no_grad()
def accept_length(
    drafter: BlockDrafter, target: Target, inputs: Blocks, damage: Damage | None = None
) -> float:
    """1 + the mean number of leading right drafts, over all blocks."""
    right = target.lm_head(drafter(inputs, damage)).argmax(-1) == inputs.labels
    return 1 + right.cumprod(-1).sum(-1).float().mean().item()
