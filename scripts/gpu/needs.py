"""What parts need of a machine, by name: see LOOKS, and `needs` of each part."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

MOST = 64 << 20  # bytes that a checkout and its wheels may have
SGLANG = {
    "sglang": "sglang", "sgl_kernel": "sglang-kernel", "sglang_router": "sglang-router",
    "requests": "requests", "rich": "rich",
}  # fmt: skip
PLUGIN = {"torch": "torch", "numpy": "numpy", "msgspec": "msgspec", "zmq": "pyzmq"}


def missing(packages: dict[str, str]) -> str:
    """Of packages by their modules; "" if none."""
    lacks = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
    return f"the packages {', '.join(lacks)}" if lacks else ""


def gpu() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "an NVIDIA GPU and its driver (libcuda.so.1)"
    try:
        import torch
    except ImportError as error:
        return f"PyTorch: {error}"
    return "" if torch.cuda.is_available() else "an NVIDIA GPU, or a PyTorch built for CUDA"


def compiler() -> str:
    """What Triton needs to compile a kernel's launcher."""
    if "CC" not in os.environ and not (shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler for Triton (gcc or clang on the PATH, or one that CC names)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's C headers for Triton (Debian: apt-get install python3-dev)"
    return missing({"triton": "triton"})


def nvcc() -> str:
    """It is looked for as SGLang does (cuda_home in kernels/jit/utils/compile/toolchain.py)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    lacks = ["ninja"] if shutil.which("ninja") is None else []
    lacks += ["c++"] if "CXX" not in os.environ and shutil.which("c++") is None else []
    if not (found or (not home and Path("/usr/local/cuda/bin/nvcc").exists())):
        lacks.append("nvcc (or in CUDA_HOME)")
    text = "on the PATH, with which kernels are compiled at first use"
    return f"{', '.join(lacks)} {text}" if lacks else ""


def imported(module: str, package: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:
        name = getattr(error, "name", None)
        return f"the package {package}" if name == module.split(".")[0] else f"{package}: {error!r}"
    return ""


def mooncake() -> str:
    return imported("mooncake.engine", "mooncake-transfer-engine")


def mooncake_cuda() -> str:
    """Builds that do not tell know GPU memory."""
    if lacks := mooncake():
        return lacks
    engine = importlib.import_module("mooncake.engine")
    if getattr(engine, "SUPPORT_CUDA", True):
        return ""
    names = (found.name for found in metadata.distributions())
    found = [name for name in names if name.startswith("mooncake-transfer-engine")]
    return f"a Mooncake for GPU memory ({', '.join(found) or 'this one'} is built without CUDA)"


def sglang() -> str:
    if lacks := missing(SGLANG):
        return lacks
    plugins = metadata.entry_points(group="sglang.srt.plugins")
    if any(plugin.name == "mixkv" for plugin in plugins):
        return ""
    return "sglang-mixkv as an installed package, or its wheel: SGLang does not see it"


LOOKS: dict[str, Callable[[], str]] = {
    "gpu": gpu,
    "plugin": lambda: missing(PLUGIN),
    "compiler": compiler,
    "nvcc": nvcc,
    "mooncake": mooncake,
    "mooncake-cuda": mooncake_cuda,
    "nixl": lambda: imported("nixl._api", "nixl"),
    "flashinfer": lambda: imported("flashinfer.decode", "flashinfer-python"),
    "sglang": sglang,
}
"""By need: what this machine lacks of it, "" if nothing."""


def rdma() -> str:
    """RDMA devices, and whether they can reach GPU memory through the kernel's module."""
    folder = Path("/sys/class/infiniband")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    peermem = Path("/sys/module/nvidia_peermem").exists()
    return f"{', '.join(found)}; nvidia_peermem {'' if peermem else 'not '}loaded" if found else ""


def rdma_bytes() -> int:
    """What all devices have received: the kernel counts words of four bytes."""
    counters = Path("/sys/class/infiniband").glob("*/ports/*/counters/port_rcv_data")
    return 4 * sum(int(counter.read_text()) for counter in counters)


def carried(root: Path, wheels: list[Path]) -> int:
    """Bytes of the checkout's own files and of these folders."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    files = [root / name for name in listed.stdout.split("\0") if name]
    files += [path for folder in wheels for path in folder.rglob("*")]
    return sum(path.stat().st_size for path in files if path.is_file())


def machine(chosen: int) -> dict[str, Any]:
    """What a reader must know of this machine. `chosen`: the GPU to describe."""
    import common

    lacks = {name: look() for name, look in LOOKS.items()}
    found = {**common.machine(), "lacks": lacks, "gpus": 0, "rdma": rdma()}
    if not lacks["gpu"]:
        import torch

        count = torch.cuda.device_count()
        about = torch.cuda.get_device_properties(chosen if chosen < count else 0)
        found.update(
            gpu=about.name, gpus=count, cuda=torch.version.cuda,
            gpu_memory_gib=round(about.total_memory / 2**30, 1),
            capability=f"{about.major}.{about.minor}",
        )  # fmt: skip
    return found
