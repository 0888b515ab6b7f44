"""Reads over Mooncake, with the plane's own engine.

Reads are asynchronous: each range is a batch, polled by its number until it has ended.
`transfer_sync_read` is unsuitable: it returns after MC_TRANSFER_TIMEOUT while bytes may still land,
and it busy-waits. Over TCP, a read fails once its socket has made no progress for 30 s
(MC_TCP_PROGRESS_TIMEOUT_SEC), and the socket is then closed. Sockets are reused; with
MC_TCP_ENABLE_CONNECTION_POOL=0, `start` would block to connect for each read.

The first read from a name opens it: Mooncake queries the peer for its registered memory. `connect`
sends that query itself, with a time limit, in the format of Mooncake's releases (readString in its
common.h). It then lets Mooncake open an address of this process, which
returns the peer's answer. Mooncake never drops a cached answer, so each new process at a peer's
address gets a new name. Host names in an answer are rejected.

Over RDMA, a read is split where the peer's registered memory ends, so its first bytes may land
before it fails. After a partial failure, Mooncake queries the peer's own address again, so a read
may reach a newer process there. The slot's stamp reveals that. tests/rdma/ covers soft-RoCE, host
memory and two hosts: it does not show whether GPU memory is read correctly, or whether a failed
read on a NIC may still touch local memory.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_mixkv.channel.data_plane import (
    DataPlane,
    Endpoint,
    Extent,
    Memory,
    Read,
    RemoteMemory,
    refused,
)

METADATA = 1  # HandShakeRequestType
LONGEST = 1 << 18  # bytes of an answer, which usually has a few thousand
# Seconds. A peer serves one connection at a time, so an earlier one may delay the answer.
# Handing the answer to Mooncake takes a millisecond.
ANSWER_S, HAND_S = 10.0, 1.0


def forces_tcp(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether MC_FORCE_TCP is set. Any value makes Mooncake use only TCP."""
    return "MC_FORCE_TCP" in environ


class Mooncake(DataPlane):
    """`host`: this rank's address. `devices`: its GPU's RDMA devices, comma-separated; "" lets
    Mooncake choose. MC_FORCE_TCP and MOONCAKE_PROTOCOL select the transport, as in SGLang."""

    name = "mooncake"

    def __init__(self, host: str, devices: str = "") -> None:
        super().__init__()
        from mooncake.engine import TransferEngine

        protocol = os.environ.get("MOONCAKE_PROTOCOL", "rdma")
        self._engine: Any = TransferEngine()
        devices = "" if forces_tcp() else devices
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code:
            raise refused("a Mooncake transfer engine to start", f"code {code}")
        self._host = f"[{host}]" if ":" in host else host
        self._names: dict[Endpoint, str] = {}
        self._numbers = itertools.count()

    def _register(self, memory: Memory) -> bytes:
        code = self._engine.register_memory(memory.address, memory.size)
        if code:
            raise refused(f"Mooncake to register {memory.size} bytes", f"code {code}")
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def _open(self, peer: RemoteMemory) -> None:
        answer = _ask(peer.endpoint.session.decode())
        peer.name = self._names.get(peer.endpoint) or _hand(answer, next(self._numbers))
        self._names[peer.endpoint] = peer.name

    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        """Start one transfer per range: `transfer_check_status` checks only the first range of a
        batch (mooncake-integration/transfer_engine/transfer_engine_py.cpp), and the call that
        checks all of them blocks."""
        read.handle = []  # Mooncake's IDs of the transfers in flight
        begin = self._engine.batch_transfer_async_read
        for local, remote, length in extents:
            number = begin(read.peer.name, [local], [remote], [length])
            if not 0 < number < 1 << 63:  # 0, or -1 (perhaps unsigned): an error
                self._names.pop(read.peer.endpoint, None)  # the name may not be open
                raise ConnectionError(f"Mooncake rejected a read from {read.peer.name}")
            read.handle.append(number)

    def _check(self, read: Read) -> str | None:
        while read.handle:  # one at a time, since each query releases the GIL
            state = self._engine.transfer_check_status(read.handle[-1])
            if state not in (1, -1):  # -2: past MC_SLICE_TIMEOUT, but still in flight
                return None
            if state == -1:
                read.failed = "Mooncake reports a failure"
            read.handle.pop()
        return ""

    def _drop(self, peer: RemoteMemory) -> None:
        peer.name = None  # Mooncake keeps about a hundred bytes for the peer


def _ask(session: str) -> bytes:
    """Send a peer the query with which Mooncake opens it, and return the answer as a frame. Raises
    if the answer is late, or is not from a peer of this plane."""
    until, found, size = time.monotonic() + ANSWER_S, bytearray(), 9
    with socket.create_connection(_address(session), ANSWER_S) as peer:
        peer.sendall(_frame({}))
        while len(found) < size <= LONGEST:
            peer.settimeout(until - time.monotonic())  # raises once it is negative
            if not (part := peer.recv(LONGEST)):
                break
            found += part
            size = max(size, 8 + int.from_bytes(found[:8], "little"))
    if len(found) != size or found[8] != METADATA:
        raise ValueError(f"{session} answered {bytes(found[:100])!r}")
    answer = json.loads(found[9:])
    if answer["name"] != session:
        raise ValueError(f"{session} identifies itself as {answer['name']!r}")
    # Mooncake uses this address for the NICs of a peer with MC_RDMA_BIND_ADDRESS.
    answer["name"] = answer.pop("rdma_server_name", "") or session
    _address(answer["name"])
    ipaddress.ip_address(answer.get("tcp_data_host") or "::")
    return _frame(answer)


def _address(name: str) -> tuple[str, int]:
    """Split `host:port`. Raises ValueError unless the host is an IP address."""
    host, _, port = name.rpartition(":")
    return str(ipaddress.ip_address(host.strip("[]"))), int(port)


def _frame(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<QB", 1 + len(text), METADATA) + text


def _hand(answer: bytes, number: int) -> str:
    """Serve the answer once on a loopback address; return that address, for Mooncake to open."""
    host = str(ipaddress.ip_address("127.0.0.1") + number % (1 << 23))
    listener = socket.create_server((host, 0))
    listener.settimeout(HAND_S)

    def serve() -> None:
        with contextlib.suppress(OSError), listener, listener.accept()[0] as mooncake:
            mooncake.settimeout(HAND_S)
            mooncake.sendall(answer)
            while mooncake.recv(LONGEST):
                pass

    threading.Thread(target=serve, name="mixkv-hand", daemon=True).start()
    host = f"[::ffff:{host}]" if "MC_USE_IPV6" in os.environ else host
    return f"{host}:{listener.getsockname()[1]}"
