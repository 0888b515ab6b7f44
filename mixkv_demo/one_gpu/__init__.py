"""Flags and variables for the demo's servers on GPUs. If there is only one GPU, all ranks share it,
so that TP 2 -> TP 1 runs there, too.

NCCL refuses two ranks on one device, so gloo replaces it there and copies through host memory. This
slows down each layer, but does not change the bytes that servers transfer. SGLang finds the plugin
in `support.py` if `site/` is on the path; nothing else imports it.
"""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

SITE = Path(__file__).parent / "site"
"""The folder on PYTHONPATH with the entry point."""
SHARED_ENV, NO_DUAL_GEMM_ENV = "MIXKV_DEMO_ONE_GPU", "MIXKV_DEMO_NO_DUAL_GEMM"

CUDA_FLAGS: tuple[str, ...] = (
    *("--device", "cuda"),
    *("--attention-backend", "triton"),
    *("--sampling-backend", "pytorch"),  # FlashInfer's kernels need nvcc at run time
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--skip-server-warmup",
    *("--max-total-tokens", "8192"),
    *("--dtype", "bfloat16"),
)
"""Flags of every server on GPUs."""


class Setup(NamedTuple):
    """Flags and variables for the demo's servers on this machine's GPUs, and the reasons."""

    flags: tuple[str, ...]
    env: dict[str, str]
    reasons: tuple[str, ...]


def cards() -> int:
    """Count the GPUs that a server may use, without making a CUDA context in this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip()])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def setup(count: int, has: frozenset[str] | None = None) -> Setup:
    """Choose the setup for `count` GPUs. `has`: the optional packages; None to look for them."""
    if has is None:
        has = frozenset(name for name in ("cutlass",) if find_spec(name))
    path = os.environ.get("PYTHONPATH", "")
    flags, env = [*CUDA_FLAGS], {"PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), path]))}
    reasons = ["Attention runs in Triton: no other backend supports the small pair's heads."]
    if "cutlass" not in has:
        env[NO_DUAL_GEMM_ENV] = "1"
        reasons.append("The drafter's MLP runs without its fused dual GEMM: CUTLASS is missing.")
    if count > 1:
        flags += ["--mem-fraction-static", "0.5"]
        return Setup(tuple(flags), env, tuple(reasons))
    flags += [
        # Both features map memory of other ranks' GPUs. The second is on for DeepSeek on Hopper.
        "--disable-custom-all-reduce",
        "--enforce-disable-flashinfer-allreduce-fusion",
        "--no-enable-tp-lm-head-all-to-all",  # this option needs NCCL
        "--mem-fraction-static", "0.2",  # for each of a pair's three ranks
    ]  # fmt: skip
    # SGLang's own variable makes each rank see one GPU, as device 0. The hooks choose which GPU.
    env |= {SHARED_ENV: "1", "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1"}
    reasons.append("All ranks share one GPU, so gloo replaces NCCL, and each layer takes longer.")
    return Setup(tuple(flags), env, tuple(reasons))
