"""The doctor's registered memory, and how bytes get from one to another: by Mooncake or NIXL."""

from __future__ import annotations

import ctypes
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

WRITE_S = 60.0
NIXL_BACKEND = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
NIXL_PARAMS = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"


class TransferFailed(RuntimeError):
    """The transfer did not work; the text says where."""


def nixl_backend(
    names: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> tuple[str, dict[str, str]]:
    """NIXL's backend and its parameters as SGLang makes them of its variables and these devices
    (nixl/conn.py, NixlKVManager.__init__). Raises ValueError."""
    backend, text = environ.get(NIXL_BACKEND, "UCX"), environ.get(NIXL_PARAMS, "{}")
    try:
        params = json.loads(text)
    except ValueError:
        params = None
    if not isinstance(params, dict) or not all(isinstance(v, str) for v in params.values()):
        raise ValueError(
            f"{NIXL_PARAMS}: expected a JSON object of strings, got {text}. SGLang does not start "
            "over NIXL: mend it, or unset the variable"
        )
    if backend != "UCX" or not names or environ.get("UCX_NET_DEVICES"):
        return backend, params
    if any(":" in name for name in names):
        text = f"over NIXL expected devices without ports, as in mlx5_0, got {', '.join(names)}"
        raise ValueError(f"--disaggregation-ib-device: {text}. SGLang does not start so")
    listed = [name.strip() for name in params.get("device_list", ",".join(names)).split(",")]
    if listed != list(names):
        raise ValueError(
            f"--disaggregation-ib-device names {', '.join(names)}, and {NIXL_PARAMS} "
            f"{', '.join(listed)}. SGLang does not start so: leave one of them out"
        )
    return backend, {**params, "device_list": ", ".join(listed)}


def nixl_name(environ: Mapping[str, str] = os.environ) -> str:
    """NIXL, and its backend where that is not the default."""
    backend = environ.get(NIXL_BACKEND, "UCX")
    return "NIXL" if backend == "UCX" else f"NIXL, {backend}"


class Memory(Protocol):
    """One registered region. `told`: what the other side needs in order to write to it."""

    address: int
    buffer: Any
    told: Mapping[str, Any]

    def write(self, peer: Mapping[str, Any], size: int) -> None:
        """The first bytes of this region to that of a peer. Raises TransferFailed."""

    def close(self) -> None: ...


class MooncakeMemory:
    """Over an engine of its own, with the protocol and the devices that SGLang would name."""

    def __init__(self, host: str, size: int, names: Sequence[str] = ()) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-untyped]

        self._engine = TransferEngine()
        protocol, devices = os.environ.get("MOONCAKE_PROTOCOL", "rdma"), ",".join(names)
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices) != 0:
            text = f"Mooncake could not be initialized on {host}"
            raise TransferFailed(f"{text}, devices {devices}" if devices else text)
        self.buffer: Any = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.buffer)
        if self._engine.register_memory(self.address, size) != 0:
            raise TransferFailed("Mooncake could not register memory")
        session = f"[{host}]" if ":" in host else host
        session += f":{self._engine.get_rpc_port()}"
        self.told: Mapping[str, Any] = {"session": session, "address": self.address}

    def write(self, peer: Mapping[str, Any], size: int) -> None:
        session = peer["session"]
        code = self._engine.transfer_sync_write(session, self.address, peer["address"], size)
        if code != 0:
            text = f"Mooncake returned {code} for {size} bytes to {session}"
            if session.startswith("[") and "MC_USE_IPV6" not in os.environ:
                text += ". Over IPv6 it needs MC_USE_IPV6=1 on both hosts, the servers' too"
            raise TransferFailed(text)

    def close(self) -> None:
        self._engine.unregister_memory(self.address)


class NixlMemory:
    """Over a NIXL agent of its own, with the backend that SGLang would take."""

    def __init__(self, host: str, size: int, names: Sequence[str] = ()) -> None:
        from nixl._api import (  # type: ignore[import-untyped]
            nixl_agent,
            nixl_agent_config,
            nixl_thread_sync_t,
        )

        backend, params = nixl_backend(names)
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent = nixl_agent(
            str(uuid.uuid4()), nixl_agent_config(backends=[], sync_mode=strict)
        )
        try:
            self._agent.create_backend(backend, params)
        except Exception as error:
            text = f"NIXL could not make its backend {backend} with {params}: {error!r}"
            raise TransferFailed(text) from None
        self.buffer: Any = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.buffer)
        self._region = self._agent.register_memory([(self.address, size, 0, "")], "DRAM")
        metadata = self._agent.get_agent_metadata().hex()
        self.told: Mapping[str, Any] = {
            "session": self._agent.name,
            "address": self.address,
            "metadata": metadata,
        }

    def write(self, peer: Mapping[str, Any], size: int) -> None:
        session = peer["session"]
        self._agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        ranges = (
            self._agent.get_xfer_descs([(address, size, 0)], "DRAM")
            for address in (self.address, peer["address"])
        )
        handle = self._agent.initialize_xfer("WRITE", *ranges, session)
        state, deadline = self._agent.transfer(handle), time.monotonic() + WRITE_S
        while state == "PROC" and time.monotonic() < deadline:
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferFailed(f"NIXL says {state} of {size} bytes to {session}")

    def close(self) -> None:
        self._agent.deregister_memory(self._region)


MEMORIES: dict[str, Callable[[str, int, Sequence[str]], Memory]] = {
    "mooncake": MooncakeMemory,
    "nixl": NixlMemory,
}
