"""Read one process's slots from another, as a decode rank reads a prefill rank's.

    serve   listens on a port, fills slots, and answers each reader with their StagingFacts
    read    asks a listener, reads its slots, compares each byte, and reports the wrong ones

Both set up the memory and data plane of a server's rank, each in its own process, since a transport
may crash. The port is a ZMQ socket, which port scanners and health checks do not disturb.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec
import numpy as np
import zmq

from sglang_mixkv.channel import planes
from sglang_mixkv.channel.data_plane import Memory, RemoteMemory
from sglang_mixkv.channel.handshake import StagingFacts
from sglang_mixkv.channel.slots import slots_of
from sglang_mixkv.channel.sockets import endpoint
from sglang_mixkv.config import PLANE_ENV, Config

READ = 8
"""Slots per read. Two reads are made, and the faster one counts."""
ANSWER_S, READ_S, LIMIT_S, LISTEN_S = 60, 30, 120, 600
LINGER_MS = 5000  # lets a closed socket still send its last message
HERE, PR_SET_PDEATHSIG = "127.0.0.1", 1
VERBS, FILES = Path("/sys/class/infiniband_verbs"), Path("/proc/self/fd")


class ReadFailed(RuntimeError):
    """A read, or another call in its own process, failed; the text states where."""


class Wire(msgspec.Struct, frozen=True):
    """The choices of a server's flags and variables."""

    backend: str = "mooncake"
    devices: str = ""
    config: Config = Config()

    @property
    def plane(self) -> planes.Choice:
        return planes.choose(self.backend, self.config.data_plane)


class Result(msgspec.Struct):
    """One side's result. `used`: the RDMA devices that it had open. `wrong`: the first wrong byte
    of each wrong slot. A listener's `bytes` and `seconds` are 0."""

    memory: str
    used: list[str]
    wrong: list[str]
    bytes: int = 0
    seconds: float = 0.0


class Ask(msgspec.Struct, tag="ask 5"):
    """A reader's request. Releases with different messages have different tags."""

    plane: str
    host: str  # the listener's address, as seen by the reader
    wrong: list[str] | None = None  # set once the reader is done


Offer = StagingFacts | str
"""A listener's slots, or the reason why it has none."""


def text_of(file: Path) -> str:
    """Read a device's attribute without its number: `4: ACTIVE` as ACTIVE."""
    try:
        return file.read_text().strip().rpartition(": ")[2]
    except OSError:
        return "unknown"


def devices_in_use() -> list[str]:
    """Return the RDMA devices that this process has open. Mooncake and UCX do not report their
    transport, and silently fall back to TCP; but each device that they use is an open file."""
    files = (os.readlink(file) for file in FILES.iterdir() if file.is_symlink())
    verbs = {os.path.basename(file) for file in files if "/infiniband/uverbs" in file}
    return sorted(text_of(VERBS / name / "ibdev") for name in verbs)


def pattern(number: int, size: int) -> Any:
    """Return a slot's test bytes, which reveal any piece that is shifted, missing or foreign."""
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words + np.uint64(number + 1)).view(np.uint8)


class LocalEnd:
    """Staging memory, on the first GPU if there is one, registered with a data plane."""

    def __init__(self, wire: Wire, host: str) -> None:
        import torch

        from sglang_mixkv.draft.rows import Staging

        gpu = 0 if torch.cuda.is_available() else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        count, size = slots_of(wire.config.staging_mb)
        staging = Staging(count, size, torch.device("cpu" if gpu is None else f"cuda:{gpu}"))
        self.slot = staging.slot
        self.plane = planes.make(wire.plane.name, host, wire.devices, wire.config.nixl_params)
        self.plane.register(Memory(staging.address, staging.size, gpu))
        endpoint = self.plane.endpoint
        self.facts = StagingFacts(wire.plane.name, endpoint, staging.address, size, count)
        kind = "host" if gpu is None else "GPU"
        self.memory = f"{kind}, {count} slots of {size >> 10:,} KiB"


@contextmanager
def _socket(kind: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as made:
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.LINGER, LINGER_MS)
        yield made


def serve(host: str, port: int, wire: Wire) -> Result:
    """Serve until a reader has reported which slots were wrong. `host`: "*" for all addresses."""
    side: LocalEnd | None = None
    with _socket(zmq.REP) as listener:
        try:
            listener.bind(endpoint(host, port))
        except zmq.ZMQError as error:
            raise ReadFailed(f"cannot listen on port {port}: {error.strerror}") from None
        if host == "*":
            print(f"listening on port {port} for one --peer", file=sys.stderr, flush=True)
        while True:
            try:
                ask = msgspec.msgpack.decode(listener.recv(), type=Ask)
                if ask.plane != wire.plane.name:
                    text = "expected reads over {} ({})".format(*wire.plane)
                    raise ReadFailed(f"{text}, got {ask.plane}: set {PLANE_ENV} on both sides")
                if side is None:
                    side = LocalEnd(wire, ask.host)
                    for number, slot in enumerate(map(side.slot, range(READ))):
                        slot.copy_(slot.new_tensor(pattern(number, side.facts.slot_bytes)))
                if ask.wrong is not None:
                    return Result(side.memory, devices_in_use(), ask.wrong)
                offer: Offer = side.facts
            except msgspec.DecodeError:
                offer = "expected the same release of the doctor on both sides"
            except Exception as error:
                offer = str(error) or repr(error)
            listener.send(msgspec.msgpack.encode(offer))


def read(host: str, port: int, wire: Wire) -> Result:
    """Read a listener's slots, and tell it which were wrong."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(address)  # sends nothing
        here, there = route.getsockname()[0], route.getpeername()[0]
    with _socket(zmq.REQ) as asking:
        asking.connect(endpoint(there, port))
        ask = Ask(wire.plane.name, there)
        asking.send(msgspec.msgpack.encode(ask))
        side = LocalEnd(wire, here)
        if not asking.poll(ANSWER_S * 1000):
            text = f"no doctor --listen answers at {host}:{port}: start it, and open its port"
            raise ReadFailed(text)
        offer = msgspec.msgpack.decode(asking.recv(), type=Offer)
        if isinstance(offer, str):
            raise ReadFailed(f"on the other side: {offer}")
        found = _read_slots(side, side.plane.connect(offer.endpoint), offer)
        ask.wrong = found.wrong
        asking.send(msgspec.msgpack.encode(ask))
    return found


def _read_slots(side: LocalEnd, peer: RemoteMemory, offer: StagingFacts) -> Result:
    """Read twice, into separate slots, since the first read also connects."""
    size, seconds, wrong = min(offer.slot_bytes, side.facts.slot_bytes), [], dict[int, str]()
    what = f"a read of {READ} x {size:,} bytes"
    for first in (0, READ):
        begin = time.monotonic()
        here = (side.slot(first + n).data_ptr() for n in range(READ))
        ranges = [(at, offer.base + n * offer.slot_bytes, size) for n, at in enumerate(here)]
        side.plane.start(first, peer, ranges)
        while not (ended := side.plane.ended()):
            if time.monotonic() - begin > READ_S:
                raise ReadFailed(f"{what} did not end within {READ_S} s")
            time.sleep(1e-4)
        if error := ended[0][1]:
            raise ReadFailed(f"{what} failed: {error}")
        seconds.append(time.monotonic() - begin)
        for n in range(READ):
            found = side.slot(first + n)[:size].cpu().numpy()
            differs = np.flatnonzero(found != pattern(n, size))
            wrong |= {n: f"byte {differs[0]} of slot {n}"} if differs.size else {}
    return Result(side.memory, devices_in_use(), [*wrong.values()], READ * size, min(seconds))


def result(wire: Wire, listen: int | None = None, peer: tuple[str, int] | None = None) -> Result:
    """Read from `peer`, let a peer read from port `listen`, or read between two processes here."""
    roles: list[Any] = [(serve, "*", listen)] if peer is None else [(read, *peer)]
    if peer is None and listen is None:
        with socket.create_server((HERE, 0)) as free:
            port = free.getsockname()[1]
        roles = [(serve, HERE, port), (read, HERE, port)]
    found: Result = apart(LIMIT_S if listen is None else LISTEN_S, *((*one, wire) for one in roles))
    return found


def apart(seconds: int, *calls: Sequence[Any]) -> Any:
    """Run each function with its arguments in a process of its own, since an import or a transport
    may crash it. Return the last one's result. Raises ReadFailed if one fails or takes too long."""
    with (
        NamedTemporaryFile() as log,
        ProcessPoolExecutor(
            len(calls), multiprocessing.get_context("spawn"), _confine, (log.name, seconds)
        ) as pool,
    ):
        try:
            running = [pool.submit(_run, *call) for call in calls]
            futures.wait(running, return_when=futures.FIRST_EXCEPTION)
            # If one has failed, the other may never end: collect only those that have ended.
            return [one.result() for one in running if one.done()][-1]
        except BrokenProcessPool:
            last = b" | ".join(log.read().splitlines()[-3:]).decode(errors="replace")
            raise ReadFailed(f"a process died, or took {seconds} s: {last}") from None
        finally:
            for process in pool._processes.values():  # a listener would wait forever for its reader
                process.kill()


def _confine(log: str, seconds: int) -> None:
    """Make this process end with the doctor, or after `seconds`, and send its transports' output to
    `log`. Only Python's own stderr stays as it is."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(seconds)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _run(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception as error:
        text = str(error) or repr(error)
        if text.startswith("mooncake: [") and "MC_USE_IPV6" not in os.environ:
            text += ". Over IPv6, Mooncake needs MC_USE_IPV6=1 on both hosts, for servers too"
        raise ReadFailed(text) from None
