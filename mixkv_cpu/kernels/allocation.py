"""Page allocation in PyTorch for SGLang 0.5.21, which has only GPU kernels for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


class Launched:
    """A function that is called like a Triton kernel, with a grid first."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self._function


def extend_by(naive: Callable[..., None]) -> Launched:
    """Return SGLang's kernel for new tokens' pages, made from ``naive``, its loop in PyTorch."""

    def extend(
        prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, out: Tensor,
        _size: int, page_size: int,
    ) -> None:  # fmt: skip
        naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, out.device)

    return Launched(extend)


def decode(
    seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, out: Tensor, _size: int, page_size: int
) -> None:
    """Allocate one slot per request: after its last slot, or the first slot of a new page."""
    fresh = (seq_lens - 1) % page_size == 0
    pages = free_pages[(fresh.cumsum(0) - 1).clamp(0, free_pages.numel() - 1)]
    out.copy_(torch.where(fresh, pages * page_size, last_loc + 1))
