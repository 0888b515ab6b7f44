"""SGLang's CPU engine on a machine without a GPU or AMX.

Start a server with the environment of :func:`launch_env` and the flags in :data:`LAUNCH_FLAGS`.
The environment puts ``site/`` on the path, where ``import sgl_kernel`` finds plain PyTorch kernels
and SGLang finds a plugin: the metadata of a distribution ``mixkv-cpu``, with the entry point
:func:`mixkv_cpu.support.install`. Without ``site/`` on the path, no process imports any of this.

Importing this module imports neither torch nor SGLang, so it is fast.
"""

from __future__ import annotations

import os
from itertools import cycle, islice
from pathlib import Path

SITE = Path(__file__).parent / "site"
"""The folder on PYTHONPATH: a stand-in for ``sgl_kernel``, the entry point, and ``sitecustomize``,
which makes imports faster."""

CPU_ENGINE_ENV = "SGLANG_USE_CPU_ENGINE"

SPAWN_ENV = "SGLANG_CPU_ENGINE_SPAWN"
"""If 1, a server's processes start as on GPUs, each in a new interpreter that imports everything
again. Otherwise, they are forked, which halves the start time."""

LAUNCH_FLAGS: tuple[str, ...] = (
    *("--device", "cpu"),
    *("--attention-backend", "intel_amx"),
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--no-enable-tp-lm-head-all-to-all",
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
    *("--max-total-tokens", "8192"),
    *("--dtype", "bfloat16"),
)
"""Flags of every CPU server. On CPU, SGLang supports neither speculation with overlap nor graphs.
By default, CUDA pins the memory for a decode server's retracted requests. The all-to-all of a
decode server with DP attention (``sglang::reg_all_to_all_single``, used if all DP ranks have the
same number of rows) is an operator that SGLang registers for CUDA only."""


LOOPBACK_ENV = {
    "SGLANG_HOST_IP": "127.0.0.1",
    "MOONCAKE_PROTOCOL": "tcp",
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
}
"""Variables for servers on one host without RDMA, with either engine."""


def launch_env(num_ranks: int = 1) -> dict[str, str]:
    """Return the variables of a server with `num_ranks` scheduler processes."""
    env = {
        CPU_ENGINE_ENV: "1",
        "OMP_NUM_THREADS": "1",
        # PyNccl would load any libnccl, and ask that library for a CUDA device.
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        **LOOPBACK_ENV,
        "PYTHONPATH": _with_site(os.environ.get("PYTHONPATH", "")),
    }
    if num_ranks > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = _core_of_each_rank(num_ranks)
    return env


def _with_site(path: str) -> str:
    """Return a PYTHONPATH with the site folder first, and only once."""
    others = [folder for folder in path.split(os.pathsep) if folder and folder != str(SITE)]
    return os.pathsep.join([str(SITE), *others])


def _core_of_each_rank(num_ranks: int) -> str:
    """Return one core per rank, as "0|1|0". By default, SGLang requires a NUMA node per rank."""
    cores = cycle(sorted(os.sched_getaffinity(0)))
    return "|".join(str(core) for core in islice(cores, num_ranks))
