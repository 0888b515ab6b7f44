"""Layers that targets and drafters share. Parameters carry their Hugging Face names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(width, inner), linear(width, inner)
        self.down_proj = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def inverse_frequencies(head_dim: int, base: float) -> Tensor:
    """[head_dim / 2]: angle per position of each rotated pair."""
    return 1 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (first half, second half) pairs, as Llama has it."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs, as DeepSeek has it; halves come out, and dot
    products stay the same."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Random matrices by name order; what writes to the residual stream starts small."""
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() != 2:
            continue
        scale = 0.5 if "embed_tokens" in name else parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= 0.3
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
