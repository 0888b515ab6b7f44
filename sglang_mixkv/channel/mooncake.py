"""Reads over Mooncake, with an engine of this plane's own.

Reads are asynchronous: each range is a batch, whose number is asked for its state until it has
ended. `transfer_sync_read` would not do: it returns after MC_TRANSFER_TIMEOUT while bytes may
still arrive, and it takes a core while it waits. Over TCP a read fails when its socket has made no
progress for 30 s (MC_TCP_PROGRESS_TIMEOUT_SEC), and the socket is closed then. Sockets are used
again; with MC_TCP_ENABLE_CONNECTION_POOL=0 each read would connect in `start`, and wait for that.

Opening a peer waits up to a minute for one that is stopped, and holds a lock that every read
takes. So a peer is opened in `connect`, after a probe of it, which holds none. What is known of a
peer is cached for good by its name, `host:port`. So each process that an address ever had gets a
name of its own: the same port with one more zero in front.

Tests over TCP cannot show what only RDMA does: that memory which was not registered is refused,
that a read across several NICs or of a GPU's memory is right, that a failed read was the last to
touch local memory (its work request is flushed), and that a peer at an old address, under another
name, gets new queue pairs.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sglang_mixkv.channel.data_plane import DataPlane, Extent, Memory, Peer, Read, refused


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
        self._zeros: defaultdict[str, dict[bytes, int]] = defaultdict(dict)
        self._naming = threading.Lock()

    def _register(self, memory: Memory) -> bytes:
        code = self._engine.register_memory(memory.address, memory.size)
        if code:
            raise refused(f"{memory.size} bytes are registered with Mooncake", f"code {code}")
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def _open(self, peer: Peer) -> None:
        session = peer.endpoint.session.decode()
        code = self._engine.send_probe(session)
        if code:
            raise ConnectionError(f"{session} does not answer, its probe returned {code}")
        with self._naming:
            known = self._zeros[session]
            zeros = known.setdefault(peer.endpoint.instance, len(known))
        host, _, port = session.rpartition(":")
        peer.link = f"{host}:{'0' * zeros}{port}"

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
                raise ConnectionError(f"Mooncake rejected a read from {read.peer.link}")
            read.handle.append(number)

    def _check(self, read: Read) -> str | None:
        running = []
        for number in read.handle:
            state = self._engine.transfer_check_status(number)
            if state == -1:
                read.failed = "Mooncake reports a failure"
            elif state != 1:  # -2: longer than MC_SLICE_TIMEOUT, and still in flight
                running.append(number)
        read.handle = running
        return None if running else ""

    def _drop(self, peer: Peer) -> None:
        peer.link = None  # Mooncake retains what it knows, some hundred bytes
