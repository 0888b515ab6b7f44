"""What SGLang asks of a GPU while it resolves a launch line, answered where there is none.

Without an answer it ends early for targets with DSA or linear attention, which production servers
start. An answer is of a kind of GPU, which decides attention backends and types of KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

GPUS = {"hopper": (9, 0), "blackwell": (10, 0)}
"""Compute capabilities."""


def is_there() -> bool:
    """Whether SGLang finds a device on this host."""
    from sglang.srt.utils import get_device

    try:
        get_device()
    except RuntimeError:
        return False
    return True


@contextmanager
def as_on(gpu: str) -> Iterator[None]:
    """Resolve as on a host with such a GPU."""
    import torch
    from sglang.srt.runtime_context import override_platform

    capability, is_hopper = GPUS[gpu], gpu == "hopper"
    facts = {
        "is_cuda": True, "device_capability": capability,
        "device_sm": 10 * capability[0] + capability[1],
        "is_sm90": is_hopper, "is_hopper_with_cuda_12_3": is_hopper,
        "is_sm100": not is_hopper, "is_sm100_or_sm110": not is_hopper,
        "is_blackwell": not is_hopper,
    }  # fmt: skip
    asked = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: capability
    try:
        with override_platform(**facts):
            yield
    finally:
        torch.cuda.get_device_capability = asked
