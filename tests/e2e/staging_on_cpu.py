"""`sglang.launch_server` whose SGLANG_DISAGG_STAGING_BUFFER works without a GPU.

Four things of SGLang's staging code need CUDA (or XPU), and are left out or replaced here:

    StagingBuffer                  allows these devices alone
    gather and scatter             KV and staging on one device with a number
    their order                    streams and events; copies on a CPU are done when they return
    the copies                     Triton's kernels, without SGLANG_STAGING_USE_TORCH=1

Everything else is SGLang's: sizes, slots, messages, watermarks, copies by torch.
"""

from __future__ import annotations

import contextlib
import runpy
from types import SimpleNamespace
from typing import Any

STAGED = "SGLang copied KV from its staging buffer"
ENV = {"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_STAGING_USE_TORCH": "1"}


class Done:
    """A stream or an event on which nothing is ever under way."""

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
    """Wrap Scheduler.__init__."""
    from sglang.srt.disaggregation.common import staging_buffer, staging_handler

    staging_buffer._STAGING_SUPPORTED_DEVICE_TYPES += ("cpu",)
    staging_buffer._check_kv_on_staging_device = lambda *_: None
    staging_buffer.scatter_staging_to_kv = staged(staging_buffer.scatter_staging_to_kv)
    for module in (staging_buffer, staging_handler):
        module.create_device_stream = module.create_device_event = lambda *_: Done()
        module.device_stream_context = lambda *_: contextlib.nullcontext()
    original(scheduler, *args, **kwargs)


def on_a_numbered_device(original: Any, handler: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap DecodeStagingHandler.__init__."""
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
