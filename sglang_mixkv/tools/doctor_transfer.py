"""A small real transfer between two processes, over Mooncake or NIXL, checked byte by byte.

    listener   waits on a TCP port; registers memory; tells its session and address
    sender     connects; writes each block; asks the listener what arrived

Control messages are JSON lines. The session addresses are those of the control connection,
so what is tried is the way that the two hosts already reach each other. One check a run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from sglang_mixkv import cpu
from sglang_mixkv.tools.doctor_memory import MEMORIES, Memory, TransferFailed, protocol

SIZES = (64 << 10, 4 << 20)
"""Bytes of the blocks that are sent, one after the other."""

SETUP_S = 60.0
"""Limit for a connection, and for each answer of the other side."""

LISTEN_S = 600.0
PREFIX = "mixkv-doctor "
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


@contextmanager
def _memory(backend: str, host: str) -> Iterator[Memory]:
    """Registered memory of the size of the largest block."""
    memory = MEMORIES[backend](host, max(SIZES))
    try:
        yield memory
    finally:
        memory.close()


def _say(stream: IO[str], **message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _hear(stream: IO[str]) -> dict[str, Any]:
    line = stream.readline(1 << 16)
    try:
        found = json.loads(line)
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


def listen(
    port: int, host: str = "0.0.0.0", limit_s: float = LISTEN_S, backend: str = "mooncake"
) -> int:
    """Serve one check; returns the number of blocks that arrived right. Port 0: any, printed."""
    with socket.create_server((host, port)) as server:
        server.settimeout(limit_s)
        print(f"listening on port {server.getsockname()[1]}", flush=True)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            raise TransferFailed(f"no peer came within {limit_s:.0f} s") from None
    connection.settimeout(SETUP_S)
    with connection, connection.makefile("rw") as stream, _telling(stream):
        if _hear(stream).get("hello") != f"{_HELLO} {backend}":
            text = f"the other side is another version of the doctor, or does not try {backend}"
            raise TransferFailed(text)
        with _memory(backend, connection.getsockname()[0]) as memory:
            _say(stream, **memory.told)
            return _confirm(stream, memory)


def _confirm(stream: IO[str], memory: Memory) -> int:
    right = 0
    for size in SIZES:
        _hear(stream)
        wrong = first_difference(pattern(size), memory.buffer.raw[:size])
        right += wrong < 0
        ctypes.memset(memory.address, 0, size)
        _say(stream, first_wrong=wrong)
    return right


def send(host: str, port: int, backend: str = "mooncake") -> list[dict[str, Any]]:
    """Write each block to a listener: its bytes, seconds, and first wrong byte (-1: none)."""
    try:
        connection = socket.create_connection((host, port), timeout=SETUP_S)
    except OSError as error:
        raise TransferFailed(f"no connection to {host}:{port}: {error}") from None
    with connection, connection.makefile("rw") as stream, _telling(stream):
        _say(stream, hello=f"{_HELLO} {backend}")
        peer = _hear(stream)
        with _memory(backend, connection.getsockname()[0]) as memory:
            return [_send_block(stream, memory, peer, size) for size in SIZES]


def _send_block(stream: IO[str], memory: Memory, peer: dict[str, Any], size: int) -> dict[str, Any]:
    ctypes.memmove(memory.address, pattern(size), size)
    begin = time.monotonic()
    memory.write(peer, size)
    seconds = time.monotonic() - begin
    _say(stream, written=size)
    return {"bytes": size, "seconds": seconds, "first_wrong": _hear(stream)["first_wrong"]}


# ---------------------------------------------------------------- in processes of their own


def _environment() -> dict[str, str]:
    """As a server would have it; on hosts without RDMA what Mooncake's TCP needs."""
    extra = {}
    if protocol() == "tcp":
        names = ("MC_FORCE_TCP", "MC_TCP_ENABLE_CONNECTION_POOL")
        extra = {name: cpu.launch_env()[name] for name in names}
    return {**os.environ, **extra, "PYTHONUNBUFFERED": "1"}


def _start(role: str, host: str, port: int, backend: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, role, f"{host}:{port}", backend], env=_environment(),
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_sender(host: str, port: int, backend: str = "mooncake") -> list[dict[str, Any]]:
    """:func:`send` in a child process: what the transport aborts is not this one."""
    with _start("send", host, port, backend) as child:
        blocks: list[dict[str, Any]] = _result(child, 2 * SETUP_S)
    return blocks


def run_listener(port: int, backend: str = "mooncake") -> int:
    """:func:`listen` on all addresses, in a child process: how many blocks arrived right."""
    with _start("listen", "0.0.0.0", port, backend) as child:
        print(f"listening on port {_port_of(child)} for one --peer", file=sys.stderr, flush=True)
        return int(_result(child, LISTEN_S + 2 * SETUP_S))


def loopback(backend: str = "mooncake") -> list[dict[str, Any]]:
    """A transfer between two child processes of this host."""
    with _start("listen", "127.0.0.1", 0, backend) as child:
        try:
            return run_sender("127.0.0.1", _port_of(child), backend)
        finally:
            child.kill()


def _result(child: subprocess.Popen[str], limit_s: float) -> Any:
    """What the child says at its end, within this limit. Raises TransferFailed."""
    try:
        out, _ = child.communicate(timeout=limit_s)
    except BaseException as error:
        child.kill()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise TransferFailed(f"no end after {limit_s:.0f} s") from None
    lines = out.splitlines()
    said = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    if not said:
        last = " | ".join(line for line in lines[-3:] if line)
        raise TransferFailed(f"a child process ended with status {child.returncode}: {last}")
    found = json.loads(said[-1])
    if "failed" in found:
        raise TransferFailed(found["failed"])
    return found["result"]


def _port_of(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("listening on port "):
            return int(line.split()[-1])
    raise TransferFailed("the listening process ended before it listened")


def main(argv: list[str]) -> int:
    """The child processes: listen HOST:PORT, or send HOST:PORT."""
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}")
    parser.add_argument("role", choices=("listen", "send"))
    parser.add_argument("address")
    parser.add_argument("backend", choices=MEMORIES)
    args = parser.parse_args(argv)
    host, port = split_address(args.address)
    try:
        if args.role == "send":
            result: Any = send(host, port, args.backend)
        else:
            result = listen(port, host, backend=args.backend)
        print(f"\n{PREFIX}{json.dumps({'result': result})}", flush=True)
    except Exception as error:
        print(f"\n{PREFIX}{json.dumps({'failed': str(error) or repr(error)})}", flush=True)
        return 1
    return 0


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT in two; raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"expected HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
