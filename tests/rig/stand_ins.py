"""Processes that stand in for many ranks each, on the channel's control plane: real sockets, and
messages as a rank sends them, without rows or SGLang. Each room has one segment of SEGMENT tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import Ack, Announced, Message, Open, Ready, draw_instance, fail
from sglang_mixkv.channel.sockets import Poller, endpoint, new_context, new_socket
from sglang_mixkv.channel.times import Times

from .threads import HEADS, HOST, SEGMENT, SLOT_BYTES, SOON_S

STAMP = 99
Socket = zmq.Socket[bytes]


class _Process:
    """`body` gets a pipe, and a poller on which it is."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        context = mp.get_context("fork")
        self._pipe, there = context.Pipe()

        def run() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent, however that ends
            poller = Poller()
            poller.register(there.fileno())
            body(there, poller, *args)

        self._process = context.Process(target=run, daemon=True)
        self._process.start()

    def take(self, seconds: float = SOON_S) -> Any:
        """What it says next; TimeoutError if it does not."""
        if not self._pipe.poll(seconds):
            raise TimeoutError
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class PrefillRanks(_Process):
    """`rows`: instance and address of each. Each READY is of slot 0, under STAMP."""

    def __init__(self, count: int) -> None:
        super().__init__(_serve, count)
        self.rows: list[tuple[bytes, str]] = self.take()

    def restart(self) -> None:
        """All of them: each port is closed, and bound by another instance."""
        self._pipe.send("restart")
        self.rows = self.take()


class Readers(_Process):
    """Decode ranks of one prefill rank."""

    def __init__(self) -> None:
        super().__init__(_read)

    def connect(self, count: int, address: str, prefill: bytes) -> None:
        """So many more, to the prefill rank of that instance."""
        self._ask(count, address, prefill)

    def restart(self) -> None:
        """All of them: each socket is closed, and another instance connects."""
        self._ask()

    def _ask(self, *command: Any) -> None:
        self._pipe.send(command)
        self.take()

    def open(self, rooms: list[tuple[int, int]]) -> None:
        """Of so many readers, by number, these rooms. `take` then gives the seconds from each
        room's OPEN to its READY, once all are read."""
        self._pipe.send((rooms,))


def _frames(socket: Socket) -> Iterator[list[bytes]]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)


# ---------------------------------------------------------------- prefill


def _serve(pipe: Any, poller: Poller, count: int) -> None:
    context, ranks = new_context(), dict[Socket, tuple[bytes, str]]()

    def start(address: str) -> None:
        socket = new_socket(context, zmq.ROUTER, HOST, Times())
        _bind(socket, address)
        ranks[socket] = draw_instance(), socket.getsockopt_string(zmq.LAST_ENDPOINT)
        poller.register(socket)

    for _ in range(count):
        start(endpoint(HOST, 0))
    pipe.send(list(ranks.values()))
    while True:
        for at in poller.poll(1000):
            if at in ranks:
                _answer(at, ranks[at][0])
                continue
            pipe.recv()
            for socket, (_, address) in list(ranks.items()):
                del ranks[socket]
                poller.unregister(socket)
                socket.close()
                start(address)
            pipe.send(list(ranks.values()))
            break


def _bind(socket: Socket, address: str) -> None:
    until = time.monotonic() + SOON_S
    while True:
        try:
            return socket.bind(address)  # type: ignore[return-value]
        except zmq.ZMQError:  # its former socket is still being closed
            if time.monotonic() > until:
                raise
            time.sleep(1e-3)


def _answer(socket: Socket, instance: bytes) -> None:
    for name, frame in _frames(socket):
        message = messages.decode(frame)
        if isinstance(message, Open):
            socket.send_multipart([name, messages.encode(_reply(message, instance))])


def _reply(opened: Open, instance: bytes) -> Message:
    room = opened.room, opened.generation
    if opened.prefill != instance:
        return fail(*room, "restarted")
    return Ready(*room, 0, opened.first_token, (Announced(0, STAMP, SEGMENT),), True)


# ---------------------------------------------------------------- decode


class _Reading:
    """The readers of one process."""

    def __init__(self, pipe: Any, poller: Poller) -> None:
        self._pipe, self._poller, self._context = pipe, poller, new_context()
        self._address, self._prefill = "", b""
        self.readers: dict[Socket, bytes] = {}
        self._numbers = itertools.count(1)
        self._left: set[int] = set()  # generations that are not read
        self._opened: dict[int, float] = {}  # when, by generation
        self._seconds: dict[int, float] = {}

    def obey(self) -> None:
        match self._pipe.recv():
            case int(count), str(address), bytes(prefill):
                self._address, self._prefill = address, prefill
                self._connect(count)
            case (list(rooms),):
                self._open_all(rooms)
            case _:
                former = list(self.readers)
                self.readers.clear()
                for socket in former:
                    self._poller.unregister(socket)
                    socket.close()
                self._connect(len(former))

    def _connect(self, count: int) -> None:
        for _ in range(count):
            socket = new_socket(self._context, zmq.DEALER, HOST, Times())
            socket.setsockopt(zmq.IMMEDIATE, 1)  # it can send once it is connected
            socket.connect(self._address)
            self.readers[socket] = draw_instance()
            self._poller.register(socket)
        assert all(socket.poll(int(SOON_S * 1000), zmq.POLLOUT) for socket in self.readers)
        self._pipe.send(None)

    def _open_all(self, rooms: list[tuple[int, int]]) -> None:
        readers = list(self.readers.items())
        self._opened, self._seconds = {}, {}
        for number, room in rooms:
            socket, reader = readers[number]
            generation = next(self._numbers) << 32 | messages.draw() & 0xFFFFFFFF
            self._left.add(generation)
            self._opened[generation] = time.perf_counter()
            heads = HEADS.start, HEADS.stop
            opened = Open(3, room, generation, self._prefill, reader, 1, heads, 0, SLOT_BYTES)
            socket.send(messages.encode(opened))
            self._poller.used(socket)

    def read(self, socket: Socket) -> None:
        for frame, *_ in _frames(socket):
            ready = messages.decode(frame)
            assert isinstance(ready, Ready), ready
            since = time.perf_counter() - self._opened.get(ready.generation, 0)
            self._seconds[ready.generation] = since
            slots = tuple((one.slot, one.stamp) for one in ready.segments)
            socket.send(messages.encode(Ack(slots)))
            self._left.discard(ready.generation)
        if self._opened and not self._left:
            self._pipe.send([self._seconds[generation] for generation in self._opened])
            self._opened = {}


def _read(pipe: Any, poller: Poller) -> None:
    reading = _Reading(pipe, poller)
    while True:
        for at in poller.poll(1000):
            if at in reading.readers:
                reading.read(at)
            elif isinstance(at, int):
                reading.obey()
