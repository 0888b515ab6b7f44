"""Run `sglang.launch_server` with a SGLANG_DISAGG_STAGING_BUFFER that works without a GPU.

Four parts of SGLang's staging code need CUDA (or XPU), and are removed or replaced here:

    StagingBuffer                  accepts only these devices
    gather and scatter             need KV and staging on the same numbered device
    their order                    streams and events; a CPU copy is complete when it returns
    the copies                     Triton's kernels; SGLANG_STAGING_USE_TORCH=1 replaces them

The rest is SGLang's code: sizes, slots, messages, watermarks, and copies by torch.
"""

from __future__ import annotations

import contextlib
import runpy
from types import SimpleNamespace
from typing import Any

STAGED = "SGLang copied KV from its staging buffer"
ENV = {"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_STAGING_USE_TORCH": "1"}


class Done:
    """A stand-in for a stream or an event that is always complete."""

    def nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = nothing

    def query(self) -> bool:
        return True


def staged(real: Any) -> Any:
    def scatter(*args: Any) -> Any:
        print(STAGED, flush=True)
        return real(*args)

    return scatter


def with_staging(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap Scheduler.__init__: allow staging on a CPU."""
    from sglang.srt.disaggregation.common import staging_buffer, staging_handler

    staging_buffer._STAGING_SUPPORTED_DEVICE_TYPES += ("cpu",)
    staging_buffer._check_kv_on_staging_device = lambda *_: None
    staging_buffer.scatter_staging_to_kv = staged(staging_buffer.scatter_staging_to_kv)
    for module in (staging_buffer, staging_handler):
        module.create_device_stream = module.create_device_event = lambda *_: Done()
        module.device_stream_context = lambda *_: contextlib.nullcontext()
    original(scheduler, *args, **kwargs)


def on_a_numbered_device(original: Any, handler: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap DecodeStagingHandler.__init__, which reads the number of the KV's device."""
    import torch

    kwargs = dict(kwargs)
    info = kwargs["kv_buffer_info"]
    numbered = SimpleNamespace(device=torch.device("cpu", 0))
    kwargs["kv_buffer_info"] = {**info, "k_buffers": [numbered]}
    original(handler, *args, **kwargs)
    handler.kv_buffer_info = info


if __name__ in ("__main__", "__mp_main__"):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in (
        ("managers.scheduler.Scheduler.__init__", with_staging),
        (
            "disaggregation.common.staging_handler.DecodeStagingHandler.__init__",
            on_a_numbered_device,
        ),
    ):
        HookRegistry.register(f"sglang.srt.{name}", hook, HookType.AROUND)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
