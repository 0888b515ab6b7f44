"""Reads over Mooncake, with an engine of this plane's own.

Reads are asynchronous: each range is a batch, whose number is asked for its state until it has
ended. `transfer_sync_read` would not do: it returns after MC_TRANSFER_TIMEOUT while bytes may
still arrive, and it takes a core while it waits. Over TCP a read fails when its socket has made no
progress for 30 s (MC_TCP_PROGRESS_TIMEOUT_SEC), and the socket is closed then. Sockets are used
again; with MC_TCP_ENABLE_CONNECTION_POOL=0 each read would connect in `start`, and wait for that.

The first read of a name opens it: Mooncake asks the peer for its memory, waits up to a minute for
each byte of the answer, and holds a lock that all reads take. So `connect` asks instead, by the
protocol of Mooncake's releases (readString in its common.h), and Mooncake opens an address of this
process, which gives it the answer. It caches that for good, so each process that a peer's address
ever had gets its own name. Host names in an answer are refused, since one thread of Mooncake's
looks them up for all connections.

Over RDMA a read is cut where the peer's registered memory ends, so its first bytes may land before
it fails. After a failed part Mooncake asks the peer's own address again, so a read from a peer that
is gone may reach the next process there: the slot's stamp shows it. tests/rdma/ covers soft-RoCE,
host memory and two hosts: it does not show that reads of GPU memory are right, or that on a NIC a
failed read no longer touches local memory.
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
from collections.abc import Sequence
from typing import Any

from sglang_mixkv.channel.data_plane import DataPlane, Endpoint, Extent, Memory, Peer, Read, refused

METADATA = 1  # HandShakeRequestType
LONGEST = 1 << 18  # bytes of an answer, which has some thousand
# Seconds. A peer answers one connection after the other, and waits 5 s for a silent one. Within
# this process it takes a millisecond.
ANSWER_S, HAND_S = 10.0, 1.0


class Mooncake(DataPlane):
    """`host`: this rank's address. `devices`: RDMA devices of its GPU, joined by commas, "" for
    Mooncake's choice. The transport is the one that SGLang's engine takes: MC_FORCE_TCP and
    MOONCAKE_PROTOCOL decide."""

    name = "mooncake"

    def __init__(self, host: str, devices: str = "") -> None:
        super().__init__()
        from mooncake.engine import TransferEngine

        tcp = "MC_FORCE_TCP" in os.environ
        protocol = os.environ.get("MOONCAKE_PROTOCOL", "rdma")
        self._engine: Any = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "" if tcp else devices)
        if code:
            raise refused("a transfer engine of Mooncake's starts", f"code {code}")
        self._host = f"[{host}]" if ":" in host else host
        self._names: dict[Endpoint, str] = {}
        self._numbers = itertools.count()

    def _register(self, memory: Memory) -> bytes:
        code = self._engine.register_memory(memory.address, memory.size)
        if code:
            raise refused(f"{memory.size} bytes are registered with Mooncake", f"code {code}")
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def _open(self, peer: Peer) -> None:
        answer = _ask(peer.endpoint.session.decode())
        peer.link = self._names.get(peer.endpoint) or _hand(answer, next(self._numbers))
        self._names[peer.endpoint] = peer.link

    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        """Transfers of one range each: `transfer_check_status` asks for the first range of a batch
        alone (mooncake-integration/transfer_engine/transfer_engine_py.cpp), and the call that asks
        for all of them waits."""
        read.handle = []  # Mooncake's numbers of those that have not ended
        for local, remote, length in extents:
            number = self._engine.batch_transfer_async_read(
                read.peer.link, [local], [remote], [length]
            )
            if not 0 < number < 1 << 63:  # a pointer, 0, or -1 as it may be unsigned
                self._names.pop(read.peer.endpoint, None)  # it may not be open
                raise ConnectionError(f"Mooncake rejected a read from {read.peer.link}")
            read.handle.append(number)

    def _check(self, read: Read) -> str | None:
        while read.handle:  # one behind the other, since each question gives up the GIL
            state = self._engine.transfer_check_status(read.handle[-1])
            if state not in (1, -1):  # -2: longer than MC_SLICE_TIMEOUT, and still in flight
                return None
            if state == -1:
                read.failed = "Mooncake reports a failure"
            read.handle.pop()
        return ""

    def _drop(self, peer: Peer) -> None:
        peer.link = None  # Mooncake keeps its entry, some hundred bytes


def _ask(session: str) -> bytes:
    """Ask a peer for what Mooncake asks when it opens it. Raises if the answer is not that of a
    peer of this plane, or does not come in time."""
    until, found, size = time.monotonic() + ANSWER_S, bytearray(), 9
    with socket.create_connection(_address(session), ANSWER_S) as peer:
        peer.sendall(_frame({}))
        while len(found) < size <= LONGEST:
            peer.settimeout(until - time.monotonic())  # which raises once it is over
            if not (part := peer.recv(LONGEST)):
                break
            found += part
            size = max(size, 8 + int.from_bytes(found[:8], "little"))
    if len(found) != size or found[8] != METADATA:
        raise ValueError(f"{session} answers {bytes(found[:100])!r}")
    answer = json.loads(found[9:])
    if answer["name"] != session:
        raise ValueError(f"{session} is {answer['name']!r}")
    # A peer with MC_RDMA_BIND_ADDRESS names its NICs by this address, and is asked there.
    answer["name"] = answer.pop("rdma_server_name", "") or session
    _address(answer["name"])
    ipaddress.ip_address(answer.get("tcp_data_host") or "::")
    return _frame(answer)


def _address(name: str) -> tuple[str, int]:
    """Split a `host:port` whose host need not be looked up; ValueError for others."""
    host, _, port = name.rpartition(":")
    return str(ipaddress.ip_address(host.strip("[]"))), int(port)


def _frame(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<QB", 1 + len(text), METADATA) + text


def _hand(answer: bytes, number: int) -> str:
    """Return a name that opens with this answer: one of this host's own 2^24 addresses."""
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
