"""Slots of one process are read by another, as a decode rank reads those of a prefill rank.

    serve   listens on a port; fills slots, and answers each reader with where they are
    read    asks a listener, reads its slots, compares each byte, reports how many are right

Each takes the data plane and the staging memory that a rank of a server with these flags and
variables would take, and is a process of its own, since a transport may end it. The address is the
one at which the reader reaches the listener. The port is a ZMQ socket, as the channel's, so port
scanners and health checks do not disturb it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import wait
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec
import numpy as np
import zmq

from sglang_mixkv.channel import planes
from sglang_mixkv.channel.data_plane import Extent, Memory, Peer
from sglang_mixkv.channel.slots import SLOTS, slot_bytes
from sglang_mixkv.channel.sockets import endpoint
from sglang_mixkv.config import PLANE_ENV, Config
from sglang_mixkv.tools.doctor_checks import devices_in_use

READ = 8
"""How many slots are read, all at once; twice, and the faster counts."""
CONNECT_S, ANSWER_S, READ_S, LIMIT_S, LISTEN_S = 10, 60, 30, 120, 600

_SPAWN = multiprocessing.get_context("spawn")


class ReadFailed(RuntimeError):
    """It did not work; the text says where."""


class Wire(msgspec.Struct, frozen=True):
    """What the flags and variables of a server decide: SGLang's transfer backend, RDMA devices, and
    the plugin's settings."""

    backend: str = "mooncake"
    devices: str = ""
    config: Config = Config()

    @property
    def plane(self) -> planes.Choice:
        return planes.choose(self.backend, self.config.data_plane)


class Result(msgspec.Struct):
    """Of one side. `wrong`: the first wrong byte of each slot that has one. A listener is told
    these, and neither bytes nor seconds."""

    memory: str
    used: list[str]
    wrong: dict[int, int]
    bytes: int = 0
    seconds: float = 0.0


# A release with other messages has other tags.
class Ask(msgspec.Struct, tag="ask 3"):
    """A reader's. `host`: the listener's address, from there. `wrong`: at its end, what was."""

    plane: str
    host: str
    wrong: dict[int, int] | None = None


class Offer(msgspec.Struct, tag="offer 3"):
    """The answer: address of the first slot and size of each, or why there are none."""

    endpoint: bytes = b""
    address: int = 0
    slot_bytes: int = 0
    failed: str = ""


def pattern(number: int, size: int) -> Any:
    """The bytes of a slot, in which a shifted, missing, doubled or foreign piece shows."""
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words + np.uint64(number + 1)).view(np.uint8)


class Side:
    """Staging memory, on the first GPU where there is one, registered with a data plane."""

    def __init__(self, wire: Wire, host: str) -> None:
        import torch

        from sglang_mixkv.draft import rows

        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(0)
        self._torch, self._rows = torch, rows
        self._device = torch.device("cuda:0" if on_gpu else "cpu")
        self.slot_bytes = slot_bytes(wire.config.staging_mb)
        self._staging = rows.Staging(SLOTS, self.slot_bytes, self._device)
        self.plane = planes.make(wire.plane.name, host, wire.devices, wire.config.nixl_params)
        memory = Memory(self._staging.address, self._staging.size, 0 if on_gpu else None)
        self.plane.register(memory, self._staging.address + 8)
        slots = f"{SLOTS} slots of {self.slot_bytes >> 10:,} KiB"
        self.memory = f"{'GPU' if on_gpu else 'host'}, {slots}"

    def address(self, number: int) -> int:
        return self._staging.address + number * self.slot_bytes

    def put(self, number: int, data: Any) -> None:
        with self._rows.own_stream(self._device):
            self._staging.slot(number)[: len(data)].copy_(self._torch.from_numpy(data))

    def get(self, number: int, size: int) -> Any:
        return self._staging.slot(number)[:size].cpu().numpy()


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """Its sockets deliver at their end what was sent, within seconds."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)
    context.setsockopt(zmq.LINGER, 5000)
    return context


def serve(host: str, port: int, wire: Wire, listening: Callable[[int], None]) -> Result:
    """Until a reader has reported which slots were wrong. `host`: "*" for all addresses."""
    side: Side | None = None
    with _context() as context, context.socket(zmq.REP) as listener:
        try:
            listener.bind(endpoint(host, port))
        except zmq.ZMQError as error:
            text = f"cannot listen on port {port}: {error.strerror}. Choose another port"
            raise ReadFailed(text) from None
        listening(int(listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))
        while True:
            try:
                ask = msgspec.msgpack.decode(listener.recv(), type=Ask)
                side = side or _filled(ask, wire)
                if ask.wrong is not None:
                    return Result(side.memory, devices_in_use(), ask.wrong)
                offer = Offer(side.plane.endpoint, side.address(0), side.slot_bytes)
            except msgspec.DecodeError:
                offer = Offer(failed="expected the same release of the doctor on both sides")
            except Exception as error:
                offer = Offer(failed=str(error) or repr(error))
            listener.send(msgspec.msgpack.encode(offer))


def _filled(ask: Ask, wire: Wire) -> Side:
    name, why = wire.plane
    if ask.plane != name:
        text = f"expected reads over {name} ({why}), got {ask.plane}"
        raise ReadFailed(f"{text}: set {PLANE_ENV} on both sides")
    side = Side(wire, ask.host)
    for number in range(READ):
        side.put(number, pattern(number, side.slot_bytes))
    return side


def read(host: str, port: int, wire: Wire) -> Result:
    """Reads from a listener, and tells it what was wrong."""
    try:
        with socket.create_connection((host, port), CONNECT_S) as probe:
            here, there = probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        raise ReadFailed(f"no connection to {host}:{port}: {error}") from None
    with _context() as context, context.socket(zmq.REQ) as asking:
        asking.connect(endpoint(there, port))
        ask = Ask(wire.plane.name, there)
        asking.send(msgspec.msgpack.encode(ask))
        side = Side(wire, here)
        if not asking.poll(ANSWER_S * 1000):
            raise ReadFailed(f"no doctor answers at {host}:{port} within {ANSWER_S} s")
        offer = msgspec.msgpack.decode(asking.recv(), type=Offer)
        if offer.failed:
            raise ReadFailed(f"on the other side: {offer.failed}")
        found = _read_slots(side, side.plane.connect(offer.endpoint), offer)
        ask.wrong = found.wrong
        asking.send(msgspec.msgpack.encode(ask))
    return found


def _read_slots(side: Side, peer: Peer, offer: Offer) -> Result:
    """Twice, into other slots, since the first read also connects."""
    size, seconds, wrong = min(offer.slot_bytes, side.slot_bytes), [], dict[int, int]()
    what = f"a read of {READ} x {size:,} bytes"
    for first in (0, READ):
        begin, pairs = time.monotonic(), [(first + n, n) for n in range(READ)]
        side.plane.start(first, peer, [
            Extent(side.address(to), offer.address + n * offer.slot_bytes, size) for to, n in pairs
        ])  # fmt: skip
        while not (ended := side.plane.ended()):
            if time.monotonic() - begin > READ_S:
                raise ReadFailed(f"{what} did not end within {READ_S} s")
            time.sleep(1e-4)
        if error := ended[0][1]:
            raise ReadFailed(f"{what} failed: {error}")
        seconds.append(time.monotonic() - begin)
        for to, n in pairs:
            differs = np.flatnonzero(side.get(to, size) != pattern(n, size))
            wrong |= {n: int(differs[0])} if differs.size else {}
    return Result(side.memory, devices_in_use(), wrong, READ * size, min(seconds))


# ---------------------------------------------------------------- the two processes


class Children(ExitStack):
    """They end with this block, and with this process."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[Any, tuple[str, Any, Any]] = {}

    def start(self, role: str, host: str, port: int, wire: Wire) -> None:
        pipe, theirs = _SPAWN.Pipe()
        log = self.enter_context(NamedTemporaryFile())  # noqa: SIM115
        process = _SPAWN.Process(target=_run, args=(theirs, log.name, role, host, port, wire))
        process.start()
        theirs.close()
        self.callback(process.join)
        self.callback(process.kill)
        self._running[pipe] = role, process, log

    def wait(self, role: str, limit_s: float = LIMIT_S) -> Any:
        """What this one reports next, its port or its Result. ReadFailed where one fails first, or
        time is up."""
        until = time.monotonic() + limit_s
        while ready := wait([*self._running], max(0, until - time.monotonic())):
            pipe: Any = ready[0]
            who, process, log = self._running[pipe]
            try:
                report = pipe.recv()
            except EOFError:
                process.join()
                last = b" | ".join(log.read().splitlines()[-3:]).decode(errors="replace")
                text = f"its process ended with status {process.exitcode}: {last}"
                raise ReadFailed(text) from None
            if isinstance(report, ReadFailed):
                raise report
            if isinstance(report, Result):
                del self._running[pipe]
            if who == role:
                return report
        raise ReadFailed(f"no end after {limit_s:.0f} s")


def _run(pipe: Any, log: str, role: str, host: str, port: int, wire: Wire) -> None:
    """In a process of its own. What transports print goes to a file."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    try:
        serves = role == "serve"
        report: Any = serve(host, port, wire, pipe.send) if serves else read(host, port, wire)
    except Exception as error:
        text = str(error) or repr(error)
        if text.startswith("mooncake: [") and "MC_USE_IPV6" not in os.environ:
            text += ". Over IPv6 it needs MC_USE_IPV6=1 on both hosts, the servers' too"
        report = ReadFailed(text)
    pipe.send(report)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def result(wire: Wire, listen: int | None = None, peer: tuple[str, int] | None = None) -> Result:
    """What a process here read from a peer, a peer from one here, or else one here from another."""
    role = "read" if listen is None else "serve"
    with Children() as children:
        if peer is None:
            children.start("serve", "127.0.0.1" if listen is None else "*", listen or 0, wire)
            peer = "127.0.0.1", children.wait("serve")
        if listen is None:
            children.start("read", *peer, wire)
        else:
            print(f"listening on port {listen} for one --peer", file=sys.stderr, flush=True)
        found: Result = children.wait(role, LIMIT_S if listen is None else LISTEN_S)
        return found
