"""Streams, of which a CPU has one."""

from __future__ import annotations

import torch
from torch import Tensor


def ignore_streams() -> None:
    """From now on a CPU tensor takes ``record_stream``, and has nothing to remember."""
    real = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: torch.Stream) -> None:
        if self.device.type != "cpu":
            real(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[assignment,method-assign]
