"""The EAGLE3 drafter (one Llama layer), unrolled over its draft steps for training.

Entry i holds the embedding of token i + 1 and the target's features of token i, and predicts
token i + 2, as in SGLang's draft model. Step s continues every entry by s of its own hidden
states, as drafting does. Shapes: B rows, T entries, S = STEPS, x [B, T, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from configs import AUX_LAYERS, Config
from layers import Mlp, RmsNorm, inverse_frequencies, linear, rotate_halves
from model import Target
from task import sample
from torch import Tensor, nn

STEPS = 3
"""Draft steps of training and of serving."""


@dataclass(frozen=True)
class Damage:
    """What a wrong KV transfer leaves in one KV head of the prompt's entries.

    ``shuffle``: 0 for zeros (never written); else another entry's bytes, with this seed.
    """

    head: int
    shuffle: int = 0


@dataclass(frozen=True)
class Batch:
    """Inputs and labels of B rows, computed once with the frozen target.

    ``prompt``: [B, T] bool, entries that prefill writes. ``labels``, ``scored``: S of [B, T].
    """

    embeddings: Tensor
    features: Tensor
    prompt: Tensor
    labels: list[Tensor]
    scored: list[Tensor]

    def first(self, rows: int) -> Batch:
        """The first rows alone."""
        return Batch(
            self.embeddings[:rows],
            self.features[:rows],
            self.prompt[:rows],
            [x[:rows] for x in self.labels],
            [x[:rows] for x in self.scored],
        )


@torch.no_grad()
def batch(
    target: Target, rows: int, shortest: int, longest: int, generator: torch.Generator
) -> Batch:
    """A random batch of the copy task."""
    ids, answer = sample(rows, shortest, longest, generator)
    length = ids.shape[1]
    following = F.pad(ids[:, 1:], (0, STEPS + 1))
    in_answer = F.pad(answer, (0, STEPS + 1))
    from_sep = answer | F.pad(answer[:, 1:], (0, 1))
    spans = [slice(1 + step, 1 + step + length) for step in range(STEPS)]
    return Batch(
        embeddings=F.pad(target.model.embed_tokens(ids[:, 1:]), (0, 0, 0, STEPS)),
        features=target(ids)[1],
        prompt=answer.cumsum(1) == 0,
        labels=[following[:, span] for span in spans],
        scored=[in_answer[:, span] & from_sep for span in spans],
    )


class Attention(nn.Module):
    """Grouped-query attention whose input is (embedding, hidden state)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.group = heads // kv_heads
        self.q_proj = linear(2 * width, heads * self.head_dim)
        self.k_proj = linear(2 * width, kv_heads * self.head_dim)
        self.v_proj = linear(2 * width, kv_heads * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, width)
        frequencies = inverse_frequencies(self.head_dim, config["rope_theta"])
        self.register_buffer("frequencies", frequencies, persistent=False)

    def project(self, x: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [B, T, heads, head_dim], and k, v [B, T, kv_heads, head_dim]."""
        positions = torch.arange(x.shape[1]) + step
        angles = (positions.float()[:, None] * self.frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate_halves(q, cos, sin), rotate_halves(k, cos, sin), v

    def per_query_head(self, x: Tensor) -> Tensor:
        """[B, T, kv_heads, head_dim] -> [B, heads, T, head_dim]."""
        return x.transpose(1, 2).repeat_interleave(self.group, 1)

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Over the entries before (step 0, causal) and over the entry's own later steps."""
        length = q.shape[2]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ keys[0].mT).masked_fill(~causal, float("-inf"))
        own = [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
        weights = (torch.cat([scores, *own], -1) * self.head_dim**-0.5).softmax(-1)
        out = weights[..., :length] @ values[0]
        for step, v in enumerate(values[1:]):
            out = out + weights[..., length + step, None] * v
        return self.o_proj(out.transpose(1, 2).flatten(2))


def damaged(x: Tensor, prompt: Tensor, damage: Damage) -> Tensor:
    """x [B, T, kv_heads, head_dim] with one head of the prompt's entries overwritten."""
    keep = torch.ones(*x.shape[:3], 1)
    keep[:, :, damage.head] = 1.0 - prompt.float()[..., None]
    if damage.shuffle == 0:
        return x * keep
    generator = torch.Generator().manual_seed(damage.shuffle)
    return x * keep + x[:, torch.randperm(x.shape[1], generator=generator)] * (1 - keep)


class Midlayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.input_layernorm, self.hidden_norm = RmsNorm(width), RmsNorm(width)
        self.post_attention_layernorm = RmsNorm(width)
        self.self_attn = Attention(config)
        self.mlp = Mlp(width, config["intermediate_size"])


class Drafter(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.fc = linear(len(AUX_LAYERS) * width, width)
        self.midlayer = Midlayer(config)
        self.norm = RmsNorm(width)
        self.lm_head = linear(width, config["draft_vocab_size"])

    def forward(self, inputs: Batch, damage: Damage | None = None) -> list[Tensor]:
        """Logits [B, T, vocabulary] of each step."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        hidden, length = self.fc(inputs.features), inputs.features.shape[1]
        keys, values, logits = [], [], []
        for step in range(STEPS):
            embedded = layer.input_layernorm(inputs.embeddings[:, step : step + length])
            x = torch.cat([embedded, layer.hidden_norm(hidden)], -1)
            q, k, v = attention.project(x, step)
            if step == 0 and damage is not None:
                k, v = (damaged(y, inputs.prompt, damage) for y in (k, v))
            keys.append(attention.per_query_head(k))
            values.append(attention.per_query_head(v))
            hidden = hidden + attention.attend(q.transpose(1, 2), keys, values)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


@torch.no_grad()
def accept_length(drafter: Drafter, inputs: Batch, damage: Damage | None = None) -> float:
    """1 + the mean number of leading right drafts, over all entries with S labels."""
    steps = zip(drafter(inputs, damage), inputs.labels, inputs.scored, strict=True)
    right = torch.stack([(logits.argmax(-1) == label) & scored for logits, label, scored in steps])
    return 1 + right.cumprod(0).sum(0)[inputs.scored[-1]].float().mean().item()
