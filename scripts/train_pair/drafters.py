"""The copy task of README.md, and the drafters that transformers does not have: EAGLE3 and DFLASH.

A has distinct symbols: if a pair occurred twice, the next symbol would be ambiguous. The shipped
models' tokenizer has the same ids. `Damage` imitates a wrong transfer of the prompt's KV. A forward
pass gives logits [..., drafts, vocabulary] for the batch's `labels` [..., drafts]; only those in
`scored` count. A batch has B rows of T tokens. The `state_dict()` of a model is its checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

PAD, BOS, SEP, MASK = 0, 1, 2, 3  # <sep> also ends the answer; DFLASH predicts what MASK stands for
FIRST_SYMBOL, VOCAB = 4, 256
AUX_LAYERS = (2, 3, 4)  # features: the residual stream at the input of these target layers
STEPS = 3  # drafts in training and in serving
BLOCKS = 8  # of DFLASH per row, in training


def sample(
    rows: int, shortest: int, longest: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw rows of `<bos> A <sep> A <sep>`, padded to one length T. Return ids [rows, T], and a
    bool [rows, T]: the positions whose next token is the answer's."""
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator)
    bos, sep, found = torch.tensor([BOS]), torch.tensor([SEP]), []
    for n in lengths:
        a = torch.randperm(VOCAB - FIRST_SYMBOL, generator=generator)[:n] + FIRST_SYMBOL
        found.append(torch.cat([bos, a, sep, a, sep]))
    ids = nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=PAD)
    at, n = torch.arange(ids.shape[1]), lengths[:, None]
    return ids, (at >= n + 1) & (at <= 2 * n + 1)


# ---------------------------------------------------------------- what both drafters have


@dataclass(frozen=True)
class Damage:
    """Damage to one KV head of the prompt's entries. `shuffle`: 0 zeroes the entries, as if never
    written; another value seeds the choice of entries to copy bytes from."""

    head: int
    shuffle: int = 0

    def done_to(self, x: Tensor, prompt: Tensor) -> Tensor:
        """Damage x [B, T, kv_heads, head_dim] in the prompt's entries. `prompt`: bool, [B, T]."""
        keep = torch.ones(*x.shape[:3], 1)
        keep[:, :, self.head] = 1.0 - prompt.float()[..., None]
        if not self.shuffle:
            return x * keep
        generator = torch.Generator().manual_seed(self.shuffle)
        return x * keep + x[:, torch.randperm(x.shape[1], generator=generator)] * (1 - keep)


@torch.no_grad()
def features_of(target: Any, ids: Tensor) -> Tensor:
    """Return the features [B, T, 3 * hidden] of a transformers model."""
    states = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in AUX_LAYERS], -1)


class Attention(nn.Module):
    """The projections of grouped-query attention with rotary positions. `normed`: with Qwen3's
    norm of each head."""

    def __init__(self, config: Any, width: int, normed: bool) -> None:
        super().__init__()
        self.size = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (norm(self.size) if normed else nn.Identity() for _ in range(2))

    def q(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return queries [B, T, heads, head_dim]."""
        return rotated(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.size))), positions)

    def kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [B, T, kv_heads, head_dim]."""
        k, v = (project(x).unflatten(-1, (-1, self.size)) for project in (self.k_proj, self.v_proj))
        return rotated(self.k_norm(k), positions), v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Return [B, T, hidden]. `visible`: bool [..., T, keys], the keys that each query sees."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def norm(width: int) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps=1e-6)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embedding to (first half, second half) pairs, as in Llama and Qwen."""
    size = x.shape[-1]
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2).float() / size)
    angles = (positions.float()[..., None] * frequencies)[..., None, :]
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# ---------------------------------------------------------------- EAGLE3


class Eagle3(nn.Module):
    """One layer whose input is (embedding of the next token, features). Entry i holds the embedding
    of token i + 1 and predicts token i + 2; three draft steps are unrolled."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(len(AUX_LAYERS) * width, width, bias=False)
        layer = self.midlayer = nn.Module()
        layer.input_layernorm, layer.hidden_norm = norm(width), norm(width)
        layer.post_attention_layernorm, layer.mlp = norm(width), Qwen3MLP(config)
        layer.self_attn = Attention(config, 2 * width, normed=False)
        self.norm, self.lm_head = norm(width), nn.Linear(width, config.vocab_size, bias=False)

    @torch.no_grad()
    def batch(
        self, target: Any, rows: int, shortest: int, longest: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        ids, answer = sample(rows, shortest, longest, generator)
        following = F.pad(ids[:, 1:], (0, STEPS + 1))
        in_answer = F.pad(answer, (0, STEPS + 1))
        from_sep = answer | F.pad(answer[:, 1:], (0, 1))
        spans = [slice(1 + step, 1 + step + ids.shape[1]) for step in range(STEPS)]
        embedded = F.pad(target.get_input_embeddings()(ids[:, 1:]), (0, 0, 0, STEPS))
        return {
            "embeddings": embedded, "features": features_of(target, ids),
            "prompt": answer.cumsum(1) == 0,
            "labels": torch.stack([following[:, span] for span in spans], -1),
            "scored": torch.stack([in_answer[:, span] & from_sep for span in spans], -1),
        }  # fmt: skip

    def forward(self, _: Any, inputs: dict[str, Tensor], damage: Damage | None = None) -> Tensor:
        layer, attention = self.midlayer, self.midlayer.self_attn
        hidden, length = self.fc(inputs["features"]), inputs["features"].shape[1]
        itself = torch.eye(length, dtype=torch.bool)
        visible, entries, logits = torch.ones_like(itself).tril(), [], []
        for step in range(STEPS):
            embedded = layer.input_layernorm(inputs["embeddings"][:, step : step + length])
            x = torch.cat([embedded, layer.hidden_norm(hidden)], -1)
            positions = torch.arange(length) + step
            q, (k, v) = attention.q(x, positions), attention.kv(x, positions)
            if step == 0 and damage is not None:
                k, v = (damage.done_to(y, inputs["prompt"]) for y in (k, v))
            entries.append((k, v))
            k, v = (torch.cat(parts, 1) for parts in zip(*entries, strict=True))
            hidden = hidden + attention(q, k, v, visible)
            visible = torch.cat([visible, itself], 1)  # of later steps, each entry sees its own
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return torch.stack(logits, -2)


# ---------------------------------------------------------------- DFLASH


class Dflash(nn.Module):
    """Two Qwen3 layers that fill a block of masks at once. Each layer projects a token's KV from
    the same target features. A block's tokens, the first of which is known, see each other and all
    tokens before the block. DSPARK's dense drafter has one more head, which adds logits that depend
    on the previous token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.block = config.hidden_size, config.block_size
        self.fc = nn.Linear(len(AUX_LAYERS) * width, width, bias=False)
        self.hidden_norm, self.norm = norm(width), norm(width)
        self.layers = nn.ModuleList(nn.Module() for _ in range(config.num_hidden_layers))
        for layer in self.layers:
            layer.self_attn, layer.mlp = Attention(config, width, normed=True), Qwen3MLP(config)
            layer.input_layernorm, layer.post_attention_layernorm = norm(width), norm(width)

    @torch.no_grad()
    def batch(
        self, target: Any, rows: int, _: int, symbols: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Draw BLOCKS blocks per row, each beginning at <sep> or a symbol of the answer."""
        block, (ids, answer) = self.block, sample(rows, symbols, symbols, generator)
        length = ids.shape[1]
        first = torch.randint(symbols + 1, length - block + 1, (rows, BLOCKS), generator=generator)
        positions = (first[..., None] + torch.arange(block)).flatten(1)
        tokens = torch.full((rows, BLOCKS, block), MASK)
        tokens[..., 0] = ids.gather(1, first)
        before = torch.arange(length) < first.repeat_interleave(block, 1)[..., None]
        own = torch.block_diag(*[torch.ones(block, block)] * BLOCKS).bool().expand(rows, -1, -1)
        labels = ids.gather(1, positions).view(rows, BLOCKS, block)[..., 1:]
        return {
            "features": features_of(target, ids), "positions": positions,
            "embeddings": target.get_input_embeddings()(tokens.flatten(1)),
            "visible": torch.cat([before, own], 2), "prompt": answer.cumsum(1) == 0,
            "labels": labels, "scored": torch.ones_like(labels, dtype=torch.bool),
        }  # fmt: skip

    def forward(
        self, target: Any, inputs: dict[str, Tensor], damage: Damage | None = None
    ) -> Tensor:
        context = self.hidden_norm(self.fc(inputs["features"]))
        x, positions = inputs["embeddings"], inputs["positions"]
        for layer in self.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            pair = attention.kv(context, torch.arange(context.shape[1]))
            if damage is not None:
                pair = tuple(damage.done_to(y, inputs["prompt"]) for y in pair)
            both = zip(pair, attention.kv(normed, positions), strict=True)
            k, v = (torch.cat(parts, 1) for parts in both)
            x = x + attention(attention.q(normed, positions), k, v, inputs["visible"][:, None])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return target.lm_head(self.norm(x).unflatten(1, (-1, self.block))[:, :, 1:])


MODELS: dict[str, type[Eagle3 | Dflash]] = {"eagle3": Eagle3, "dflash": Dflash}


def drafts(logits: Tensor, inputs: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """For each draft, return logits [entries, vocabulary] and the correct tokens [entries]."""
    steps = zip(*(x.unbind(-1) for x in (inputs["labels"], inputs["scored"])), strict=True)
    return [(logits[..., k, :][ok], labels[ok]) for k, (labels, ok) in enumerate(steps)]


def accept_length(logits: Tensor, inputs: dict[str, Tensor]) -> float:
    """Return 1 + the mean number of leading correct drafts, over entries with all labels."""
    right = (logits.argmax(-1) == inputs["labels"]) & inputs["scored"]
    leading = right.cumprod(-1).sum(-1)[inputs["scored"][..., -1]]
    return 1 + leading.float().mean().item()
