"""A small real transfer between two processes, over Mooncake or NIXL, checked byte by byte.

    listener   waits on a TCP port, where it drops who is no doctor; registers memory; tells its
               session and address
    sender     connects; writes each block; asks the listener what arrived

Each is a process of this module (doctor_child.py). Control messages are JSON lines. The session
addresses are those of the control connection, so what is tried is the way that the two hosts
already reach each other. One check a run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

from sglang_mixkv.tools.doctor_memory import MEMORIES, Memory, TransferFailed

SIZES = (64 << 10, 4 << 20)
"""Bytes of the blocks that are sent, one after the other."""

SETUP_S = 60.0
"""Limit for a connection, and for each answer of the other side."""

HELLO_S = 5.0
"""Limit for the first words of who connects to a listener: the peer may wait behind a stranger."""

LISTEN_S = 600.0
PREFIX = "mixkv-doctor "
NOTE = "mixkv-doctor-note "
LISTENING = "listening on port "
_HELLO = "sglang-mixkv doctor 1"


def pattern(size: int) -> bytes:
    """Bytes in which a shifted, missing or doubled piece shows."""
    block = b"".join((i * 2654435761 % 2**32).to_bytes(4, "little") for i in range(1 << 12))
    pages = range(-(-size // len(block)))
    return b"".join(page.to_bytes(8, "big") + block[8:] for page in pages)[:size]


def first_difference(expected: bytes, got: bytes) -> int:
    """Number of the first byte that differs, -1 when there is none."""
    if expected == got:
        return -1
    pairs = enumerate(zip(expected, got, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(expected), len(got)))


class Wire(NamedTuple):
    """What is tried: SGLang's transfer backend, Mooncake's transport, and the devices that
    --disaggregation-ib-device names."""

    backend: str
    way: str = "tcp"
    names: Sequence[str] = ()


@contextmanager
def _memory(wire: Wire, connection: socket.socket) -> Iterator[Memory]:
    """Registered memory of the size of the largest block, at the address of this connection."""
    host = connection.getsockname()[0].removeprefix("::ffff:")  # IPv4, to a socket for both
    memory = MEMORIES[wire.backend](host, max(SIZES), wire.names)
    try:
        yield memory
    finally:
        memory.close()


def _say(stream: IO[str], **message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _hear(stream: IO[str]) -> dict[str, Any]:
    try:
        found = json.loads(stream.readline(1 << 16))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TransferFailed("the other side ended the connection, or is not a doctor")
    if "failed" in found:
        raise TransferFailed(f"on the other side: {found['failed']}")
    return found


@contextmanager
def _telling(stream: IO[str]) -> Iterator[None]:
    """Tell the other side why this one stops."""
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            _say(stream, failed=str(error) or repr(error))
        raise


def listen(port: int, wire: Wire, host: str = "", limit_s: float = LISTEN_S) -> int:
    """Serve one check; returns the number of blocks that arrived right. Port 0: any, printed."""
    with _server(host, port) as server:
        print(f"{LISTENING}{server.getsockname()[1]}", flush=True)
        connection = _welcome(server, wire.backend, limit_s)
    connection.settimeout(SETUP_S)
    with (
        connection,
        connection.makefile("rw") as stream,
        _telling(stream),
        _memory(wire, connection) as memory,
    ):
        _say(stream, **memory.told)
        return _confirm(stream, memory)


def _server(host: str, port: int) -> socket.socket:
    """Listens at this address; without one at all of the host, IPv6 ones too."""
    try:
        if not host and socket.has_dualstack_ipv6():
            with suppress(OSError):  # the host may have it, and no address
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        text = f"cannot listen on port {port}: {error.strerror}. Choose another port"
        raise TransferFailed(text) from None


def _welcome(server: socket.socket, backend: str, limit_s: float) -> socket.socket:
    """The connection of the first doctor that tries this backend; others are told so and dropped:
    port scanners, health checks."""
    deadline = time.monotonic() + limit_s
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, address = server.accept()
        except TimeoutError:
            break
        try:
            _greet(connection, backend)
        except (TransferFailed, OSError) as error:
            connection.close()
            print(f"{NOTE}dropped {address[0]}, still listening: {error}", flush=True)
        else:
            return connection
    raise TransferFailed(f"no peer came within {limit_s:.0f} s")


def _greet(connection: socket.socket, backend: str) -> None:
    """Hear who connects. Raises TransferFailed or OSError for a stranger."""
    connection.settimeout(HELLO_S)
    with connection.makefile("rw") as stream, _telling(stream):
        if _hear(stream).get("hello") != f"{_HELLO} {backend}":
            text = f"the other side is another version of the doctor, or does not try {backend}"
            raise TransferFailed(text)


def _confirm(stream: IO[str], memory: Memory) -> int:
    right = 0
    for size in SIZES:
        _hear(stream)
        wrong = first_difference(pattern(size), memory.buffer.raw[:size])
        right += wrong < 0
        ctypes.memset(memory.address, 0, size)
        _say(stream, first_wrong=wrong)
    return right


def send(host: str, port: int, wire: Wire) -> list[dict[str, Any]]:
    """Write each block to a listener: its bytes, seconds, and first wrong byte (-1: none)."""
    try:
        connection = socket.create_connection((host, port), timeout=SETUP_S)
    except OSError as error:
        raise TransferFailed(f"no connection to {host}:{port}: {error}") from None
    with connection, connection.makefile("rw") as stream, _telling(stream):
        _say(stream, hello=f"{_HELLO} {wire.backend}")
        peer = _hear(stream)
        with _memory(wire, connection) as memory:
            return [_send_block(stream, memory, peer, size) for size in SIZES]


def _send_block(stream: IO[str], memory: Memory, peer: dict[str, Any], size: int) -> dict[str, Any]:
    ctypes.memmove(memory.address, pattern(size), size)
    begin = time.monotonic()
    memory.write(peer, size)
    seconds = time.monotonic() - begin
    _say(stream, written=size)
    return {"bytes": size, "seconds": seconds, "first_wrong": _hear(stream)["first_wrong"]}


# ---------------------------------------------------------------- this process


def main(argv: list[str]) -> int:
    """One of the two: listen or send, host, port, the backend, devices."""
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}")
    parser.add_argument("role", choices=("listen", "send"))
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("backend", choices=MEMORIES)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args(argv)
    wire = Wire(args.backend, names=args.names)
    try:
        if args.role == "send":
            result: Any = send(args.host, args.port, wire)
        else:
            result = listen(args.port, wire, args.host)
        print(f"\n{PREFIX}{json.dumps({'result': result})}", flush=True)
    except Exception as error:
        print(f"\n{PREFIX}{json.dumps({'failed': str(error) or repr(error)})}", flush=True)
        return 1
    return 0


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT in two; raises ValueError."""
    host, _, port = address.rpartition(":")
    named = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not named or (":" in host and named == host) or not is_port(port):
        raise ValueError(
            f"expected HOST:PORT, as in 10.0.0.1:18515 or [fd00::1]:18515, got {address!r}; PORT "
            "is the one that the other host's --listen names"
        )
    return named, int(port)


def is_port(text: str) -> bool:
    return text.isdecimal() and int(text) < 1 << 16


def _end_with_parent() -> None:
    """Its end closes our standard input, however it ends."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
