"""Hooks that SGLang's CPU engine needs in its processes, as an SGLang plugin.

    seam                                              why
    overrides._attention_backend_platform_fallbacks   without AMX, SGLang swaps intel_amx for
        (around)                                      torch_native, which supports neither MLA
                                                      extend nor target verify
    disaggregation.utils.get_kv_class                 Mooncake's sender would copy page
        (after)                                       indices with pinned memory and a CUDA
                                                      event; NIXL would treat KV as VRAM, and
                                                      poll on the cores that compute
    mem_cache.allocation.get_last_loc (around)        a Triton kernel, started if a page has
                                                      several tokens
    mem_cache.allocator.paged                         the same, up to SGLang 0.5.21
        .PagedTokenToKVPoolAllocator.__init__ (after)
    mem_cache.pool_host.base.HostKVCache.__init__     the host cache copies with CUDA kernels, and
        (around)                                      pins its memory with CUDA
    managers.scheduler.Scheduler.on_idle (after)      without --sleep-on-idle (as with
                                                      DP attention, whose ranks step together)
                                                      ranks poll on the cores that compute
    managers.data_parallel_controller                 the controller polls nonstop on one core
        .DataParallelController.__init__ (after)
    entrypoints.engine._set_envs_and_config (after)   each process of a server would import
                                                      SGLang again: 10 s of CPU time

DFLASH and DSPARK need more. `_fit_block_drafter` registers the last two hooks when a process
creates the worker of one of these drafters, since other processes never import its model:

    speculative_hook._handle_dflash, _handle_dspark   SGLang accepts only certain devices
        (around)
    SpeculativeAlgorithm.create_worker (after)        called before SGLang makes the model
    models.dflash.DFlashAttention.__init__ (after)    a Triton kernel for norm and rotation
    models.dspark.DSparkDraftMixin                    a Triton kernel that writes the prompt's KV
        ._build_fused_kv_write_bundle (replace)

SGLang finds the entry point if `site/` is on the path, and :func:`install` does nothing unless
SGLANG_USE_CPU_ENGINE, SGLang's own switch, is 1. If both are set, servers need all hooks, with or
without --enable-mixkv. `install` imports only the hook registry of SGLang.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from mixkv_cpu import CPU_ENGINE_ENV, SPAWN_ENV

NIXL_WAIT_US = 1_000
IDLE_WAIT_S, CONTROLLER_WAIT_MS = 1e-3, 100

FALLBACK = "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks"
GET_KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
LAST_LOC = "sglang.srt.mem_cache.allocation.get_last_loc"
HOST_POOL = "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__"
PAGES = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.__init__"
ON_IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"
CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController.__init__"
SET_ENVS = "sglang.srt.entrypoints.engine._set_envs_and_config"
HANDLE_DFLASH = "sglang.srt.arg_groups.speculative_hook._handle_dflash"
HANDLE_DSPARK = "sglang.srt.arg_groups.speculative_hook._handle_dspark"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
BLOCK_ATTENTION = "sglang.srt.models.dflash.DFlashAttention.__init__"
FUSED_WRITE = "sglang.srt.models.dspark.DSparkDraftMixin._build_fused_kv_write_bundle"


def install() -> None:
    """Register the hooks if this process was started with :func:`mixkv_cpu.launch_env`."""
    if os.environ.get(CPU_ENGINE_ENV) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FALLBACK, _keep_intel_amx, HookType.AROUND)
    HookRegistry.register(GET_KV_CLASS, _without_device_memory, HookType.AFTER)
    HookRegistry.register(LAST_LOC, _last_loc_in_torch, HookType.AROUND)
    HookRegistry.register(HOST_POOL, _host_pool_in_torch, HookType.AROUND)
    HookRegistry.register(PAGES, _pages_in_torch, HookType.AFTER)
    HookRegistry.register(ON_IDLE, _wait_where_none_sleeps, HookType.AFTER)
    HookRegistry.register(CONTROLLER, _wait_for_requests, HookType.AFTER)
    if os.environ.get(SPAWN_ENV) != "1":
        HookRegistry.register(SET_ENVS, _fork, HookType.AFTER)
    HookRegistry.register(HANDLE_DFLASH, _with_block_drafter, HookType.AROUND)
    HookRegistry.register(HANDLE_DSPARK, _with_block_drafter, HookType.AROUND)
    HookRegistry.register(CREATE_WORKER, _fit_block_drafter, HookType.AFTER)


def _stand_in_is_loaded() -> bool:
    """Return whether ``sgl_kernel`` is the one from ``site/``."""
    try:
        return getattr(importlib.import_module("sgl_kernel"), "IS_STAND_IN", False) is True
    except ImportError:
        return False


def _keep_intel_amx(original: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """Keep intel_amx if its kernels are the stand-in's, which need no AMX."""
    asked = view.attention_backend == "intel_amx" and view.device == "cpu"
    return {} if asked and _stand_in_is_loaded() else original(view)


def _without_device_memory(kv_class: Any, transfer_backend: Any, class_type: Any) -> None:
    """Adapt a backend's classes to KV in host memory."""
    if getattr(kv_class, "supports_host_tensor_indices", False):
        kv_class.supports_host_tensor_indices = False  # subclasses inherit the value
    if (transfer_backend.value, class_type.value) == ("nixl", "manager"):
        _fit_nixl()


def _fit_nixl() -> None:
    """Make this process's NIXL agents treat VRAM as host memory (at unequal TP sizes, SGLang
    refuses its setting for that, kv_data_mem_kinds), and wait for events instead of polling."""
    try:
        api = importlib.import_module("nixl._api")
    except ImportError:  # SGLang's manager reports this error
        return
    agent, bindings = api.nixl_agent, api.nixlBind
    if getattr(agent.__init__, "takes_vram_for_dram", False):
        return
    real = agent.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    made.takes_vram_for_dram = True  # type: ignore[attr-defined]
    agent.__init__ = made
    bindings.nixlAgentConfig = _waiting(bindings.nixlAgentConfig)


def _waiting(config: Any) -> Any:
    """Return NIXL's configuration with a progress thread that waits up to 1 ms for an event. With
    nixl_agent.__init__'s value of 0, the thread would occupy a core per rank."""
    delay = config.pthrDelay

    class Waiting(config):  # type: ignore[misc]
        pthrDelay = property(delay.fget, lambda self, _us: delay.fset(self, NIXL_WAIT_US))

    return Waiting


def _last_loc_in_torch(_original: Callable[..., Any], *args: Any) -> Any:
    """Call SGLang's own variant in PyTorch, which SGLang uses only for two backends."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args)


def _pages_in_torch(_result: None, *_args: Any, **_kwargs: Any) -> None:
    from mixkv_cpu.kernels.allocation import Launched, decode, extend_by

    module: Any = sys.modules[PAGES.removesuffix(".PagedTokenToKVPoolAllocator.__init__")]
    if not hasattr(module, "alloc_decode_naive"):  # up to SGLang 0.5.21
        module.alloc_extend_kernel = extend_by(module.alloc_extend_naive)
        module.alloc_decode_kernel = Launched(decode)


def _host_pool_in_torch(
    original: Callable[..., None], pool: Any, *args: Any, **kwargs: Any
) -> None:
    """Make a host pool in unpinned memory, with the copies that its module imports only on CUDA."""
    from mixkv_cpu.kernels.host_cache import COPIES

    base: Any = sys.modules[HOST_POOL.removesuffix(".HostKVCache.__init__")]
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # by default 10 GiB
    module = sys.modules[type(pool).__module__]
    for copy in COPIES:
        setattr(module, copy.__name__, copy)
    bound = inspect.signature(original).bind(pool, *args, **kwargs)
    bound.arguments["pin_memory"] = False
    original(*bound.args, **bound.kwargs)


def _wait_where_none_sleeps(_result: None, scheduler: Any) -> None:
    if not scheduler.server_args.sleep_on_idle:
        time.sleep(IDLE_WAIT_S)


def _wait_for_requests(_result: None, controller: Any, *_args: Any, **_kwargs: Any) -> None:
    """Let the controller's loop wait for a request, immediately after it feeds the watchdog."""
    feed = controller.soft_watchdog.feed

    def feed_and_wait() -> None:
        feed()
        controller.recv_from_tokenizer.poll(CONTROLLER_WAIT_MS)

    controller.soft_watchdog.feed = feed_and_wait


def _fork(_result: None, _server_args: Any) -> None:
    """Fork SGLang's processes; no thread runs before they start. CUDA does not support forking."""
    multiprocessing.set_start_method("fork", force=True)


class _AsXpu:
    """A view of server arguments that names a device which DFLASH and DSPARK accept."""

    device = "xpu"

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def _with_block_drafter(original: Callable[[Any], None], server_args: Any) -> None:
    """Run SGLang's resolution of DFLASH or DSPARK arguments without its check of the device."""
    from sglang.srt.arg_groups import speculative_hook

    _let_draft_with_intel_amx()
    real = speculative_hook.resolving_view
    speculative_hook.resolving_view = lambda args: _AsXpu(real(args))
    try:
        original(server_args)
    finally:
        speculative_hook.resolving_view = real


def _let_draft_with_intel_amx() -> None:
    """Allow intel_amx for drafting; without it, DFLASH and DSPARK draft with flashinfer."""
    from sglang.srt.arg_groups import choices

    if "intel_amx" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices(["intel_amx"])


def _fit_block_drafter(_worker: type, algorithm: Any, _server_args: Any) -> None:
    """Prepare for a DFLASH or DSPARK drafter before a scheduler makes its worker and model."""
    if not algorithm.is_dflash_family():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    from mixkv_cpu.kernels.streams import ignore_streams

    _let_draft_with_intel_amx()
    ignore_streams()
    DFlashVerifyInput.tree_topk = property(lambda self: self.topk)  # for intel_amx
    HookRegistry.register(BLOCK_ATTENTION, _rotate_in_torch, HookType.AFTER)
    HookRegistry.register(FUSED_WRITE, _write_in_torch, HookType.REPLACE)
    HookRegistry.apply_hooks()


def _rotate_in_torch(_result: None, attention: Any, *_args: Any, **_kwargs: Any) -> None:
    attention.use_table_qk_norm_rope = False


def _write_in_torch(_model: Any, _pool: Any) -> None:
    """Return no fused write, so that SGLang writes layer by layer, in PyTorch."""
