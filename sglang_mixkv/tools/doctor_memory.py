"""The doctor's registered memory, and how bytes get from one to another: by Mooncake or NIXL."""

from __future__ import annotations

import ctypes
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

WRITE_S = 60.0


class TransferFailed(RuntimeError):
    """The transfer did not work; the text says where."""


def protocol() -> str:
    """Mooncake's transport: as SGLang takes it, or TCP on a host without an RDMA device."""
    asked = os.environ.get("MOONCAKE_PROTOCOL", "")
    if "MC_FORCE_TCP" in os.environ:  # whatever its value
        return "tcp"
    devices = Path("/sys/class/infiniband")
    has_rdma = devices.is_dir() and any(devices.iterdir())
    return asked or ("rdma" if has_rdma else "tcp")


class Memory(Protocol):
    """One registered region. `told`: what the other side needs in order to write to it."""

    address: int
    buffer: Any
    told: Mapping[str, Any]

    def write(self, peer: Mapping[str, Any], size: int) -> None:
        """The first bytes of this region to that of a peer. Raises TransferFailed."""

    def close(self) -> None: ...


class MooncakeMemory:
    """Over an engine of its own."""

    def __init__(self, host: str, size: int) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-untyped]

        self._engine = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol(), "") != 0:
            raise TransferFailed(f"Mooncake could not be initialized on {host} ({protocol()})")
        self.buffer: Any = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.buffer)
        if self._engine.register_memory(self.address, size) != 0:
            raise TransferFailed("Mooncake could not register memory")
        session = f"{host}:{self._engine.get_rpc_port()}"
        self.told: Mapping[str, Any] = {"session": session, "address": self.address}

    def write(self, peer: Mapping[str, Any], size: int) -> None:
        session = peer["session"]
        code = self._engine.transfer_sync_write(session, self.address, peer["address"], size)
        if code != 0:
            raise TransferFailed(f"Mooncake returned {code} for {size} bytes to {session}")

    def close(self) -> None:
        self._engine.unregister_memory(self.address)


class NixlMemory:
    """Over a NIXL agent of its own, with UCX, as SGLang's default."""

    def __init__(self, host: str, size: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-untyped]

        self._agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=[]))
        self._agent.create_backend("UCX", {})
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


MEMORIES: dict[str, Callable[[str, int], Memory]] = {"mooncake": MooncakeMemory, "nixl": NixlMemory}
