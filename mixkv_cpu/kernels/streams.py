"""A replacement for a CUDA stream call, since a CPU has no streams."""

from __future__ import annotations

import torch
from torch import Tensor


def ignore_streams() -> None:
    """Make ``record_stream`` do nothing for CPU tensors from now on."""
    real = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: torch.Stream) -> None:
        if self.device.type != "cpu":
            real(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[assignment,method-assign]
