"""A rank with many peers: its threads, sockets and state machine are the real ones.

Processes stand in for its peers, with as many numbers, from 0 on, to a process as `each`: real
sockets, and messages as a rank sends them, without rows or SGLang. What a decode rank reads is in
its own memory. Each room has one segment of SEGMENT tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.data_plane import Endpoint, Memory
from sglang_mixkv.channel.messages import Ack, Announced, Open, Ready, draw_instance
from sglang_mixkv.channel.sockets import Poller, endpoint, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.draft.facts import StagingFacts
from sglang_mixkv.draft.rows import Staging

from .forks import die_with_parent
from .threads import HEADS, HOST, SEGMENT, SLOT_BYTES, SOON_S, Decode, Prefill, wait_for

STAMP = 99
PAUSE_S, LIMIT_S = 3e-4, 90.0


class DecodeRank(Decode):
    """With prefill ranks, `count` in all. Each of their READYs is of slot 0, under STAMP."""

    thread = "mixkv-decode"

    def __init__(self, count: int, each: int, times: Times | None = None) -> None:
        each = min(count, each)
        self.processes = [_Process(_serve, each) for _ in range(count // each)]
        self._rows = [row for process in self.processes for row in process.take()]
        super().__init__(times or Times())
        self._numbers, self.names = itertools.count(1), list[bytes]()
        self.image = Staging(1, SLOT_BYTES, torch.device("cpu"))
        self.rows.pack(np.arange(SEGMENT), HEADS, self.image.slot(0), STAMP)
        self._ready: dict[int, float] = {}  # when the first answer came, by generation
        self._watch()

    def _watch(self) -> None:
        machine: Any = self.channel._machine
        handle = machine.handle

        def watched(event: ev.Event, now: float) -> None:
            if isinstance(event, ev.Received):
                self._ready.setdefault(event.message.generation, time.perf_counter())
            handle(event, now)

        machine.handle = watched

    def connect(self, count: int) -> None:
        """To so many more."""
        for instance, address in self._rows[len(self.names) :][:count]:
            self.names.append(instance)
            self.reach(self._row(instance, address))
        assert wait_for(lambda: all(map(self.channel.knows, self.names)))

    def _row(self, instance: bytes, address: str) -> Any:
        memory = Memory(self.image.address, self.image.size)
        there = msgspec.msgpack.encode(Endpoint(self.plane.name, b"", memory, os.urandom(8)))
        facts = StagingFacts(self.plane.name, there, self.image.address, SLOT_BYTES, 1)
        return SimpleNamespace(instance=instance, address=address, staging=facts)

    def run(self, peers: list[int], window: int) -> list[float | None]:
        """A room each, so many at a time: seconds to the first READY; None of one that is cold."""
        found, waiting = list[float | None](), deque(peers)
        begun: deque[tuple[float, ReceiveHandle]] = deque()
        while waiting or begun:
            while waiting and len(begun) < window:
                begun.append((time.perf_counter(), self._begin(waiting.popleft())))
            if begun[0][1].state is None:
                time.sleep(PAUSE_S)
                continue
            since, handle = begun.popleft()
            self.channel.close(handle)
            ready = self._ready.pop(handle.opened.generation, since)
            found.append(ready - since if handle.state is ev.State.WARM else None)
        return found

    def _begin(self, peer: int) -> ReceiveHandle:
        handle = self.open(next(self._numbers), SEGMENT, self.names[peer])
        self.channel.target_arrived(handle)
        return handle

    def close(self) -> None:
        super().close()
        for process in self.processes:
            process.close()


class PrefillRank(Prefill):
    """With readers, `count` in all."""

    thread = "mixkv-prefill"

    def __init__(self, count: int, each: int, times: Times | None = None) -> None:
        self.each = min(count, each)
        self.processes = [_Process(_read) for _ in range(count // self.each)]
        super().__init__(times or Times())
        self.count, self._numbers = 0, itertools.count(1)

    def connect(self, count: int) -> None:
        """So many more."""
        for number, process in enumerate(self.processes):
            first, end = number * self.each, (number + 1) * self.each
            some = min(self.count + count, end) - max(self.count, first)
            if some > 0:
                process.ask(some, self.channel.address, self.instance)
                process.take()
        self.count += count

    def run(self, peers: list[int], window: int) -> list[float | None]:
        """A room each, so many at a time: seconds from OPEN to the first READY."""
        found: list[float | None] = []
        for first in range(0, len(peers), window):
            places = [divmod(peer, self.each) for peer in peers[first : first + window]]
            handles, rooms = [], dict[int, list[tuple[int, int]]]()
            for process, reader in places:
                room = next(self._numbers)
                handles.append(self.send(room, SEGMENT))
                rooms.setdefault(process, []).append((reader, room))
            for process, some in rooms.items():
                self.processes[process].ask(some, self.instance)
            taken = {process: iter(self.processes[process].take(LIMIT_S)) for process in rooms}
            found += [next(taken[process]) for process, _ in places]
            for handle in handles:
                assert wait_for(lambda handle=handle: handle.settled)
                self.channel.end(handle)
        return found

    def close(self) -> None:
        super().close()
        for process in self.processes:
            process.close()


# ---------------------------------------------------------------- the peers


Socket = zmq.Socket[bytes]


class _Process:
    """`body` gets a pipe."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        context = mp.get_context("fork")
        self._pipe, there = context.Pipe()

        def run() -> None:
            die_with_parent()
            body(there, *args)

        self._process = context.Process(target=run, daemon=True)
        self._process.start()

    def ask(self, *command: Any) -> None:
        self._pipe.send(command)

    def take(self, seconds: float = SOON_S) -> Any:
        """What it says next; TimeoutError if it does not."""
        if not self._pipe.poll(seconds):
            raise TimeoutError
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _frames(socket: Socket) -> Iterator[list[bytes]]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)


def _serve(pipe: Any, count: int) -> None:
    """Prefill ranks. Says the instance and address of each."""
    context, poller, rows = new_context(), Poller(), list[tuple[bytes, str]]()
    for _ in range(count):
        socket = new_socket(context, zmq.ROUTER, HOST, Times())
        socket.bind(endpoint(HOST, 0))
        poller.register(socket)
        rows.append((draw_instance(), socket.getsockopt_string(zmq.LAST_ENDPOINT)))
    pipe.send(rows)
    while True:
        for socket in poller.poll(1000):
            for name, frame in _frames(socket):
                message = messages.decode(frame)
                if isinstance(message, Open):
                    room = message.room, message.generation, 0, message.first_token
                    ready = Ready(*room, (Announced(0, STAMP, SEGMENT),), True)
                    socket.send_multipart([name, messages.encode(ready)])


def _read(pipe: Any) -> None:
    """Readers of one prefill rank. Asked for (count, address, instance) it connects so many more;
    for (rooms, instance), of so many readers, by number, it opens them, and says the seconds from
    each one's OPEN to its READY once all are read."""
    context, poller, numbers = new_context(), Poller(), itertools.count(1)
    readers, names = list[Socket](), list[bytes]()
    opened, seconds = dict[int, float](), dict[int, float]()
    poller.register(pipe.fileno())
    while True:
        for at in poller.poll(1000):
            if at in readers:
                for frame, *_ in _frames(at):
                    ready = messages.decode(frame)
                    assert isinstance(ready, Ready), ready
                    seconds[ready.generation] = time.perf_counter() - opened[ready.generation]
                    slots = tuple((one.slot, one.stamp) for one in ready.segments)
                    at.send(messages.encode(Ack(slots)))
                if opened and len(seconds) == len(opened):
                    pipe.send([seconds[generation] for generation in opened])
                    opened, seconds = {}, {}
                continue
            match pipe.recv():
                case int(count), str(address), _:
                    for _ in range(count):
                        readers.append(_connected(context, address))
                        names.append(draw_instance())
                        poller.register(readers[-1])
                    assert all(one.poll(int(SOON_S * 1000), zmq.POLLOUT) for one in readers)
                    pipe.send(None)
                case list(rooms), bytes(prefill):
                    for number, room in rooms:
                        generation = next(numbers) << 32 | messages.draw() & 0xFFFFFFFF
                        opened[generation] = time.perf_counter()
                        heads = HEADS.start, HEADS.stop
                        message = Open(
                            3, room, generation, prefill, names[number], 1, heads, 0, SLOT_BYTES
                        )
                        readers[number].send(messages.encode(message))
                        poller.used(readers[number])


def _connected(context: Any, address: str) -> Socket:
    socket = new_socket(context, zmq.DEALER, HOST, Times())
    socket.setsockopt(zmq.IMMEDIATE, 1)  # it can send once it is connected
    socket.connect(address)
    return socket
