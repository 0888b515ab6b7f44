"""A stand-in for ``sgl_kernel``: the kernels of SGLang's CPU engine in plain PyTorch.

With this folder's parent on PYTHONPATH, ``import sgl_kernel`` finds this package first. It
takes effect only if

    1. SGLANG_USE_CPU_ENGINE is 1, SGLang's own condition, and
    2. the ``sgl_kernel`` further down the path is not a CPU build. Compiled ``common_ops`` are
       at the top of a CPU build; CUDA builds have one per GPU architecture in subfolders.

In every other case the import returns that other ``sgl_kernel``, as if this package did not exist.
The stand-in suffices for MLA, MHA and GQA with sliding windows, for EAGLE with topk 1, DFLASH and
DSPARK. ``torch.ops.sgl_kernel`` gets the two attention operators, and some that fail when called.
The stand-in has no ``convert_weight_packed``, so layers take their native PyTorch paths.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, NoReturn

IS_STAND_IN = True
"""Distinguishes this package from the real ``sgl_kernel``."""


def _other() -> ModuleSpec | None:
    """Find the other ``sgl_kernel`` on the path."""
    site = Path(__file__).resolve().parents[1]
    return PathFinder.find_spec(__name__, [p for p in sys.path if Path(p).resolve() != site])


def _has_cpu_kernels(package: ModuleSpec | None) -> bool:
    """Return whether a package is a CPU build, by the place of its compiled operators."""
    folders = (package and package.submodule_search_locations) or ()
    return any(any(Path(folder).glob("common_ops.*")) for folder in folders)


def _is_wanted(package: ModuleSpec | None) -> bool:
    """Return whether this process runs the CPU engine and has no other kernels for that engine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and not _has_cpu_kernels(package)


def _become(package: ModuleSpec | None) -> None:
    """Replace this package with another one, which the import in progress then returns."""
    if package is None or package.loader is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    sys.modules[__name__] = module = module_from_spec(package)
    package.loader.exec_module(module)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a stub for a missing CPU kernel: it can be imported, but raises when called."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: not in the PyTorch stand-in for sgl_kernel")

    return missing


_real = _other()
if _is_wanted(_real):
    from mixkv_cpu.kernels.attention import (
        build_draft_decode_metadata_cpu,
        decode_attention_cpu,
        extend_attention_cpu,
        register_operators,
    )
    from mixkv_cpu.kernels.cache import (
        assign_draft_cache_locs_contiguous_cpu,
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        copy_all_layer_kv_cache_cpu,
    )
    from mixkv_cpu.kernels.speculative import (
        build_tree_kernel_efficient_cpu,
        fill_accept_out_cache_loc_cpu,
        fill_bonus_tokens_cpu,
        rotate_input_ids_cpu,
        verify_tree_greedy_cpu,
    )

    register_operators()
    __all__ = [
        "assign_draft_cache_locs_contiguous_cpu",
        "assign_extend_cache_locs_cpu",
        "assign_req_to_token_pool_cpu",
        "build_draft_decode_metadata_cpu",
        "build_tree_kernel_efficient_cpu",
        "copy_all_layer_kv_cache_cpu",
        "decode_attention_cpu",
        "extend_attention_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "rotate_input_ids_cpu",
        "verify_tree_greedy_cpu",
    ]
else:
    _become(_real)
