"""A stand-in for a prefill rank's Mooncake engine that sends the answers that a test chooses."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from sglang_mixkv.channel.data_plane import Endpoint

METADATA, PROBE = 1, 3
DRIP_S = 0.05

# Takes a request's kind and the real engine's answer. Returns the bytes to send, None to send
# nothing, or an iterator with items to send slowly, one by one.
Answer = Callable[[int, dict[str, Any]], Any]


def frame(text: bytes, kind: int = METADATA) -> bytes:
    return struct.pack("<QB", 1 + len(text), kind) + text


def read_frame(peer: socket.socket) -> tuple[int, bytes]:
    with peer.makefile("rb") as file:
        size, kind = struct.unpack("<QB", file.read(9))
        return kind, file.read(size - 1)


def answer_of(session: str) -> dict[str, Any]:
    """Return the answer of a real engine to a metadata request."""
    host, _, port = session.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as peer:
        peer.sendall(frame(b"{}"))
        found: dict[str, Any] = json.loads(read_frame(peer)[1])
        return found


def silent(kind: int, real: dict[str, Any]) -> Any:
    return None


def silent_from_the_opening(kind: int, real: dict[str, Any]) -> Any:
    """Answer only Mooncake's probe."""
    return frame(b"{}", PROBE) if kind == PROBE else None


def dripping(kind: int, real: dict[str, Any]) -> Any:
    return (frame(json.dumps(real).encode(), kind)[:at][-1:] for at in range(1, 1 << 20))


def silent_where_it_is_read(kind: int, real: dict[str, Any]) -> Any:
    """Answer with a data port that accepts connections but never answers reads."""
    if kind == PROBE:
        return frame(b"{}", PROBE)
    mine = int(real["name"].rpartition(":")[2])
    return frame(json.dumps(real | {"tcp_data_port": mine}).encode())


@contextmanager
def standing_for(endpoint: bytes, answer: Answer) -> Iterator[bytes]:
    """Yield an endpoint that impersonates `endpoint`. `answer` is called with the request's kind
    and the real engine's answer, in which the impostor's name replaces that of the engine."""
    of = msgspec.msgpack.decode(endpoint, type=Endpoint)
    real = answer_of(of.session.decode())
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    session = f"127.0.0.1:{listener.getsockname()[1]}"
    text = json.dumps(real).replace(str(real["name"]), session)
    taken: list[socket.socket] = []

    def serve(peer: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error):
            found = answer(read_frame(peer)[0], json.loads(text))
            if found is None:
                return
            for part in [found] if isinstance(found, bytes) else found:
                peer.sendall(part)
                time.sleep(0 if isinstance(found, bytes) else DRIP_S)
            peer.shutdown(socket.SHUT_WR)

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(listener.accept()[0])
                threading.Thread(target=serve, args=(taken[-1],), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield msgspec.msgpack.encode(
            msgspec.structs.replace(of, session=session.encode(), instance=session.encode()[-8:])
        )
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for peer in taken:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
