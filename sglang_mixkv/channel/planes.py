"""Choose and construct a rank's data plane, in a server and in `doctor`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from sglang_mixkv.channel import mooncake, nixl
from sglang_mixkv.channel.data_plane import DataPlane
from sglang_mixkv.errors import refuse

NIXL_ENV = "SGLANG_DISAGGREGATION_NIXL_BACKEND"  # SGLang's own variable, read in each rank
RDMA_DEVICES = "/sys/class/infiniband"


class Choice(NamedTuple):
    name: str
    why: str


def choose(backend: str, asked: str) -> Choice:
    """Return the plane that the operator set, or otherwise that of SGLang's backend. Without RDMA,
    Mooncake replaces UCX: there, a dying reader can crash the other process (docs/protocol.md)."""
    if asked:
        return Choice(asked, "SGLANG_MIXKV_DATA_PLANE is set")
    has_rdma = os.path.isdir(RDMA_DEVICES) and os.listdir(RDMA_DEVICES)
    if backend == "nixl" and os.environ.get(NIXL_ENV, "UCX") == "UCX" and not has_rdma:
        return Choice("mooncake", "NIXL's UCX is not safe without an RDMA device")
    return Choice("nixl" if backend == "nixl" else "mooncake", f"SGLang's backend is {backend}")


def make(name: str, host: str, devices: str, nixl_params: Mapping[str, str]) -> DataPlane:
    """Make the chosen plane. `host`: this rank's address; `devices`: its RDMA devices,
    comma-separated. Raises MixKVError if it cannot be made, for example without Mooncake."""
    if name == "nixl":
        return nixl.Nixl(*nixl_backend(devices, nixl_params))
    try:
        return mooncake.Mooncake(host, devices)
    except ImportError as error:
        raise refuse(
            "MIXKV-START-06",
            "Mooncake, to read draft KV without RDMA",
            str(error),
            "with NIXL's UCX over TCP, a dying decode process can end the prefill process",
            "Install mooncake-transfer-engine, or set SGLANG_MIXKV_DATA_PLANE=nixl to accept that",
        ) from error


def nixl_backend(devices: str, params: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return NIXL's backend and parameters as NixlKVManager does (disaggregation/nixl/conn.py)."""
    backend, params = os.environ.get(NIXL_ENV, "UCX"), dict(params)
    if devices and backend == "UCX" and not os.environ.get("UCX_NET_DEVICES"):
        params["device_list"] = ", ".join(map(str.strip, devices.split(",")))
    return backend, params
