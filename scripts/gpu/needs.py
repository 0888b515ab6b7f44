"""What parts need of a machine beyond packages: a C compiler, a transfer backend for its memory."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from parts import Lacks

# As Triton says it (runtime/build.py), also within the product's error: none, or one that failed.
UNCOMPILED = re.compile(r"Failed to find C compiler|CalledProcessError")


def compiler() -> str:
    """What Triton lacks here to compile a kernel's launcher; empty if nothing."""
    if "CC" not in os.environ and not (shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler for Triton (gcc or clang on the PATH, or one that CC names)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's C headers for Triton (Debian: apt-get install python3-dev)"
    return ""


def nvcc() -> str:
    """What SGLang lacks here to compile the kernels that it compiles at first use; empty if
    nothing. It looks for nvcc as here (cuda_home in kernels/jit/utils/compile/toolchain.py)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if found or (not home and Path("/usr/local/cuda/bin/nvcc").exists()):
        return ""
    return "nvcc, with which SGLang compiles kernels (one on the PATH, or in CUDA_HOME)"


def uncompiled(error: Exception) -> str:
    """What is lacking if this error comes of it; empty otherwise. A kernel that Triton has in its
    cache needs no compiler."""
    return compiler() if UNCOMPILED.search(f"{type(error).__name__}: {error}") else ""


def check_backend(backend: str, device: str) -> None:
    """Lacks, unless there is a build of this transfer backend for memory of this device."""
    try:
        if backend == "mooncake":
            from mooncake import engine
        else:
            import nixl._api  # noqa: F401
    except ImportError as error:
        missing = f"the package {backend}" if error.name == backend else f"{backend}: {error}"
        raise Lacks(missing) from None
    if backend == "mooncake" and device == "cuda" and not for_cuda(engine):
        names = (d.name for d in metadata.distributions())
        found = [name for name in names if name.startswith("mooncake-transfer-engine")]
        says = f"this one ({', '.join(found) or 'of no package'}) is built without CUDA"
        raise Lacks(f"a Mooncake for GPU memory: {says}")


def for_cuda(engine: object) -> bool:
    """Whether this build of Mooncake knows GPU memory. Builds that do not say so do."""
    return bool(getattr(engine, "SUPPORT_CUDA", True))
