"""One process reads slots of another, as a decode rank reads those of a prefill rank.

    serve   listens on a port; fills slots, and answers each reader with where they are
    read    asks a listener, reads its slots, compares each byte, reports how many are right

Each takes the data plane and the staging memory that a rank of a server with these flags and
variables would take, and is a process of its own (doctor_child.py), since a transport may end it.
The address is the one at which the reader reaches the listener. The port is a ZMQ socket, as the
channel's, so port scanners and health checks do not disturb it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import zmq

from sglang_mixkv.channel import planes
from sglang_mixkv.channel.data_plane import Extent, Memory, Peer
from sglang_mixkv.channel.slots import SLOTS, slot_bytes
from sglang_mixkv.channel.sockets import endpoint
from sglang_mixkv.config import PLANE_ENV
from sglang_mixkv.tools import doctor_rdma as rdma
from sglang_mixkv.tools.doctor_child import PREFIX, READ, ReadFailed, Wire

CONNECT_S, ANSWER_S, READ_S = 10, 60, 30


# A release with other messages has other tags.
class Ask(msgspec.Struct, tag="ask 2"):
    """A reader's. `host`: the listener's address, from there. `right`: at its end, how many slots
    were."""

    plane: str
    host: str
    right: int | None = None


class Offer(msgspec.Struct, tag="offer 2"):
    """The answer: address of the first slot and size of each, or why there are none."""

    endpoint: bytes = b""
    address: int = 0
    slot_bytes: int = 0
    failed: str = ""


def pattern(number: int, size: int) -> Any:
    """The bytes of a slot, in which a shifted, missing, doubled or foreign piece shows."""
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words + np.uint64(number + 1)).view(np.uint8)


def chosen(wire: Wire) -> planes.Choice:
    return planes.choose(wire.backend, wire.config.data_plane)


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
        name = chosen(wire).name
        self.plane = planes.make(name, host, wire.devices, wire.config.nixl_params)
        memory = Memory(self._staging.address, self._staging.size, 0 if on_gpu else None)
        self.plane.register(memory, self._staging.address + 8)
        slots = f"{SLOTS} slots of {self.slot_bytes >> 10:,} KiB"
        self.facts = {"memory": f"{'GPU' if on_gpu else 'host'}, {slots}", "used": rdma.in_use()}

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


def serve(host: str, port: int, wire: Wire) -> dict[str, Any]:
    """Until a reader has reported how many slots were right. `host`: "*" for all addresses."""
    side: Side | None = None
    with _context() as context, context.socket(zmq.ROUTER) as router:
        try:
            router.bind(endpoint(host, port))
        except zmq.ZMQError as error:
            text = f"cannot listen on port {port}: {error.strerror}. Choose another port"
            raise ReadFailed(text) from None
        report(port=int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))
        while True:
            reader, *parts = router.recv_multipart()
            try:
                ask = msgspec.msgpack.decode(b"".join(parts), type=Ask)
                side = side or _filled(ask, wire)
                if ask.right is not None:
                    return {"right": ask.right, **side.facts}
                offer = Offer(side.plane.endpoint, side.address(0), side.slot_bytes)
            except msgspec.DecodeError:
                offer = Offer(failed="expected the same release of the doctor on both sides")
            except Exception as error:
                offer = Offer(failed=str(error) or repr(error))
            router.send_multipart([reader, msgspec.msgpack.encode(offer)])


def _filled(ask: Ask, wire: Wire) -> Side:
    name, why = chosen(wire)
    if ask.plane != name:
        text = f"expected reads over {name} ({why}), got {ask.plane}"
        raise ReadFailed(f"{text}: set {PLANE_ENV} on both sides")
    side = Side(wire, ask.host)
    for number in range(READ):
        side.put(number, pattern(number, side.slot_bytes))
    return side


def read(host: str, port: int, wire: Wire) -> dict[str, Any]:
    """Bytes and seconds of a read, and the first wrong byte of each slot that has one."""
    try:
        with socket.create_connection((host, port), CONNECT_S) as probe:
            here, there = probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        raise ReadFailed(f"no connection to {host}:{port}: {error}") from None
    with _context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint(there, port))
        ask = Ask(chosen(wire).name, there)
        dealer.send(msgspec.msgpack.encode(ask))
        side = Side(wire, here)
        if not dealer.poll(ANSWER_S * 1000):
            raise ReadFailed(f"no doctor answers at {host}:{port} within {ANSWER_S} s")
        offer = msgspec.msgpack.decode(dealer.recv(), type=Offer)
        if offer.failed:
            raise ReadFailed(f"on the other side: {offer.failed}")
        found = _read_slots(side, side.plane.connect(offer.endpoint), offer)
        ask.right = READ - len(found["wrong"])
        dealer.send(msgspec.msgpack.encode(ask))
    return found


def _read_slots(side: Side, peer: Peer, offer: Offer) -> dict[str, Any]:
    size = min(offer.slot_bytes, side.slot_bytes)
    seconds = min([_read_once(side, peer, offer, first, size) for first in (0, READ)])
    wrong = {}
    for number in range(2 * READ):
        differs = np.flatnonzero(side.get(number, size) != pattern(number % READ, size))
        if differs.size:
            wrong[number % READ] = int(differs[0])
    return {"bytes": READ * size, "seconds": seconds, "wrong": wrong, **side.facts}


def _read_once(side: Side, peer: Peer, offer: Offer, first: int, size: int) -> float:
    """Into the slots from `first` on. How long it took."""
    begin, plane = time.monotonic(), side.plane
    extents = [
        Extent(side.address(first + n), offer.address + n * offer.slot_bytes, size)
        for n in range(READ)
    ]
    plane.start(first, peer, extents)
    while not (ended := plane.ended()):
        if time.monotonic() - begin > READ_S:
            raise ReadFailed(f"a read of {READ} x {size:,} bytes did not end within {READ_S} s")
        time.sleep(1e-4)
    if error := ended[0][1]:
        raise ReadFailed(f"a read of {READ} x {size:,} bytes failed: {error}")
    return time.monotonic() - begin


def report(**words: Any) -> None:
    """To the doctor, among the lines that transports print."""
    print(f"\n{PREFIX}{json.dumps(words)}", flush=True)


def main(argv: list[str]) -> int:
    """`serve` or `read`, host, port, the wire as JSON."""
    role, host, port, wire = argv
    run = {"serve": serve, "read": read}[role]
    try:
        report(result=run(host, int(port), msgspec.json.decode(wire, type=Wire)))
    except Exception as error:
        text = str(error) or repr(error)
        if text.startswith("mooncake: [") and "MC_USE_IPV6" not in os.environ:
            text += ". Over IPv6 it needs MC_USE_IPV6=1 on both hosts, the servers' too"
        report(failed=text)
        return 1
    return 0


def _end_with_parent() -> None:
    """Its end closes our standard input, however it ends."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
