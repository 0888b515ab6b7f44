"""Reads over NIXL, with the plane's own agent.

A read has ended when `check_xfer_state` returns DONE or ERR, or raises:

    nixlRemoteDisconnectError   broken connection or dead peer: all reads from the peer end this way
    nixlNotFoundError           at the start: the peer never registered this memory, or was removed
    others                      the backend failed

A list of ranges has one handle: UCX's backend posts one read per range, then flushes the endpoint,
and the handle is in progress until that flush completes (nixlUcxBackendReqH::status). After a
failed range, or a post that fails midway, nothing lands over any lane of the endpoint.

Over TCP, UCX connects in `add_remote_agent`. By default that call blocks, for two minutes if the
host is down, and all other calls wait for the agent's lock meanwhile.

Releasing a handle does not cancel its read: over TCP all its bytes land later. So handles are
retained until they end. A peer is removed from the agent only when it has no reads, since
`check_xfer_state` raises for a removed peer even while bytes land. Only removing the peer and
adding it again restores a broken connection.

UCX reads the host memory of a process on the same host in `transfer` itself, whether or not that
process is running. Over RDMA, the peer takes no part in a read. Otherwise (TCP, or shared memory
alone) the peer's process sends the data, and may not survive the loss of a reader, so planes.py
chooses Mooncake. Writes, such as SGLang's, have not shown that problem.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_mixkv.channel.data_plane import DataPlane, Extent, Memory, Read, RemoteMemory, refused

UNBLOCKED = {"UCX": {"engine_config": "TCP_CONN_NB=y"}}
WAIT_US = 1_000  # the progress thread's wait for an event; with 0 that thread occupies a core


class Nixl(DataPlane):
    """`backend`, `parameters`: as for SGLang's agent; UCX's parameter `device_list` names the RDMA
    devices. On a rank with a GPU, construct it in a thread whose CUDA device is set."""

    name = "nixl"

    def __init__(self, backend: str = "UCX", parameters: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._kind, self._device = "DRAM", 0
        self._naming = threading.Lock()
        self._named: defaultdict[str, set[RemoteMemory]] = defaultdict(set)
        try:
            self._agent: Any = _new_agent()
            self._agent.create_backend(backend, UNBLOCKED.get(backend, {}) | dict(parameters or {}))
        except Exception as error:
            raise refused(f"NIXL's backend {backend} to start", repr(error)) from error

    def _register(self, memory: Memory) -> bytes:
        self._kind, self._device = _place(memory)
        try:
            region = (memory.address, memory.size, self._device, "")
            self._agent.register_memory([region], self._kind)
        except Exception as error:
            raise refused(f"NIXL to register {memory.size} bytes", repr(error)) from error
        return bytes(self._agent.get_agent_metadata())

    def _open(self, peer: RemoteMemory) -> None:
        """Connect. Peers of one agent share a name and a connection. A retry first removes the
        name, since the connection may be broken, unless one of these peers has reads in flight."""
        with self._naming:
            if peer.name is not None:
                with self._lock:  # a read that begins before the name is removed would fail
                    if not any(other.reads for other in self._named[peer.name]):
                        self._agent.remove_remote_agent(peer.name)
            name = self._agent.add_remote_agent(peer.endpoint.session)
            peer.name = name.decode() if isinstance(name, bytes) else name
            self._named[peer.name].add(peer)

    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        agent, (kind, device) = self._agent, _place(read.peer.endpoint.memory)
        here = [(local, length, self._device) for local, _, length in extents]
        there = [(remote, length, device) for _, remote, length in extents]
        both = agent.get_xfer_descs(here, self._kind), agent.get_xfer_descs(there, kind)
        handle = agent.initialize_xfer("READ", *both, read.peer.name)
        if agent.transfer(handle) == "ERR":
            raise ConnectionError("NIXL rejected the read")
        read.handle = handle  # NIXL releases the handle with its last reference

    def _check(self, read: Read) -> str | None:
        state = self._agent.check_xfer_state(read.handle)
        return {"DONE": "", "PROC": None}.get(state, f"NIXL reports {state}")

    def _drop(self, peer: RemoteMemory) -> None:
        if (name := peer.name) is None:
            return
        with self._naming:
            self._named[name].discard(peer)
            if not self._named[name]:
                del self._named[name]
                self._agent.remove_remote_agent(name)


def _place(memory: Memory) -> tuple[str, int]:
    """Return NIXL's memory type, and the device."""
    return ("DRAM", 0) if memory.device is None else ("VRAM", memory.device)


def _new_agent() -> Any:
    """Make an agent with a unique name: SGLang gives `random` the same seed on all ranks.
    nixl_agent.__init__ always sets the progress thread's delay to 0: replace the inner agent."""
    api, name = importlib.import_module("nixl._api"), f"mixkv-{os.urandom(16).hex()}"
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, WAIT_US
    config.syncMode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value
    agent.agent = api.nixlBind.nixlAgent(name, config)
    return agent
