"""Which data plane a rank takes, and why: one rule, for ranks and for the doctor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from sglang_mixkv.channel import mooncake, nixl
from sglang_mixkv.channel.data_plane import DataPlane
from sglang_mixkv.errors import refuse

NAMES = ("mooncake", "nixl")
PLANE_ENV = "SGLANG_MIXKV_DATA_PLANE"
NIXL_ENV = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
NIXL_PARAMS_ENV = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
RDMA_DEVICES = "/sys/class/infiniband"


class Choice(NamedTuple):
    name: str
    why: str


def choose(backend: str, environ: Mapping[str, str] = os.environ) -> Choice:
    """As SGLANG_MIXKV_DATA_PLANE says; else the backend's own, but for UCX without RDMA: there a
    reader that dies can end the process it reads from (docs/protocol.md). MixKVError for another
    value."""
    asked = environ.get(PLANE_ENV)
    if asked and asked not in NAMES:
        raise refuse(
            "MIXKV-START-04", f"{PLANE_ENV}={' or '.join(NAMES)}", asked,
            "draft KV would be read in a way that nobody chose",
            "Correct it, or unset it: the plugin chooses",
        )  # fmt: skip
    if asked:
        return Choice(asked, f"{PLANE_ENV} is set")
    if backend == "nixl" and environ.get(NIXL_ENV, "UCX") == "UCX" and not _has_rdma():
        return Choice("mooncake", "NIXL's UCX is not safe without an RDMA device")
    return Choice("nixl" if backend == "nixl" else "mooncake", f"SGLang's backend is {backend}")


def make(backend: str, host: str, devices: str) -> DataPlane:
    """The chosen plane. `host`: this rank's address; `devices`: its RDMA devices, joined by commas.
    MixKVError where it cannot be made, as where Mooncake is not installed."""
    if choose(backend).name == "nixl":
        return nixl.Nixl(*nixl_backend(devices))
    try:
        return mooncake.Mooncake(host, devices)
    except ImportError as error:
        raise refuse(
            "MIXKV-START-06", "Mooncake, to read draft KV without RDMA", str(error),
            "with NIXL's UCX over TCP a decode process that dies can end the prefill process",
            f"Install mooncake-transfer-engine, or accept it: {PLANE_ENV}=nixl",
        ) from error  # fmt: skip


def _has_rdma() -> bool:
    return os.path.isdir(RDMA_DEVICES) and bool(os.listdir(RDMA_DEVICES))


def nixl_backend(devices: str) -> tuple[str, dict[str, str]]:
    """As NixlKVManager makes its agent (disaggregation/nixl/conn.py)."""
    backend = os.environ.get(NIXL_ENV, "UCX")
    parameters = dict(json.loads(os.environ.get(NIXL_PARAMS_ENV) or "{}"))
    if devices and backend == "UCX":
        parameters.setdefault("device_list", devices)
    return backend, parameters
