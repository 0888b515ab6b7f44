"""What SGLang's CPU engine needs from inside its processes; the plugin calls :func:`install`.

    seam                                              why
    overrides._attention_backend_platform_fallbacks   without AMX it trades intel_amx for
        (around)                                      torch_native, which does neither MLA
                                                      extend nor target verify
    disaggregation.utils.get_kv_class                 Mooncake's sender would take page
        (after)                                       indices over pinned memory and a CUDA
                                                      event; NIXL would take KV for VRAM
    mem_cache.allocation.get_last_loc (around)        with pages of several tokens it starts
                                                      a Triton kernel

Unless SGLANG_USE_CPU_ENGINE is 1, nothing is installed. With it, pairs of servers need all
hooks whether or not they opted in to mixkv. Hooks only: installing imports no SGLang module
but its hook registry.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from sglang_mixkv.cpu import CPU_ENGINE_ENV

FALLBACK = "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks"
GET_KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
LAST_LOC = "sglang.srt.mem_cache.allocation.get_last_loc"


def install() -> None:
    """Register the hooks if this process runs the CPU engine."""
    if os.environ.get(CPU_ENGINE_ENV) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FALLBACK, _keep_intel_amx, HookType.AROUND)
    HookRegistry.register(GET_KV_CLASS, _without_device_memory, HookType.AFTER)
    HookRegistry.register(LAST_LOC, _last_loc_in_torch, HookType.AROUND)


def _stand_in_is_loaded() -> bool:
    """Whether ``sgl_kernel`` is the one from ``site/``."""
    try:
        return getattr(importlib.import_module("sgl_kernel"), "IS_STAND_IN", False) is True
    except ImportError:
        return False


def _keep_intel_amx(original: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """No fallback where the stand-in gives the kernels that the backend calls."""
    asked = view.attention_backend == "intel_amx" and view.device == "cpu"
    return {} if asked and _stand_in_is_loaded() else original(view)


def _without_device_memory(kv_class: Any, transfer_backend: Any, class_type: Any) -> None:
    """What a backend's classes need where KV lies in host memory."""
    if getattr(kv_class, "supports_host_tensor_indices", False):
        kv_class.supports_host_tensor_indices = False  # subclasses inherit that
    if (transfer_backend.value, class_type.value) == ("nixl", "manager"):
        take_vram_for_dram()


def take_vram_for_dram() -> None:
    """NIXL agents of this process from now on take what is called VRAM for host memory. SGLang's
    own word for that (kv_data_mem_kinds) is refused at unequal TP sizes."""
    try:
        agent = importlib.import_module("nixl._api").nixl_agent
    except ImportError:  # SGLang's manager says so
        return
    if getattr(agent.__init__, "takes_vram_for_dram", False):
        return
    real = agent.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    made.takes_vram_for_dram = True  # type: ignore[attr-defined]
    agent.__init__ = made


def _last_loc_in_torch(_original: Callable[..., Any], *args: Any) -> Any:
    """SGLang's own variant in PyTorch, which it keeps for two backends by name."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args)
