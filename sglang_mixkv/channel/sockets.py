"""What both channel threads need of the operating system: a queue that wakes them, and sockets
that lose messages in known ways."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from typing import Any, Generic, TypeVar

import zmq

from sglang_mixkv.channel.messages import MAX_BYTES
from sglang_mixkv.channel.times import Times

T = TypeVar("T")
HEARTBEAT = 0.4  # of a connection, in parts of the time after which it is given up
EAGER, EAGER_LOOK, LOOK_MS = 0.008, 0.0002, 1  # seconds, and whole milliseconds, as zmq waits
MAX_SOCKETS = 16384  # SGLang's own default for its context; libzmq's is 1,023


class Inlet(Generic[T]):
    """Events for one thread, from any. `put` neither blocks nor waits for the GIL's other users; to
    wake a thread that sleeps costs its caller some 10 us."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, event: T, wake: bool = True) -> None:
        """`wake`: else it waits for the next event, or until the thread polls."""
        self._events.put(event)
        if wake:
            self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # woken 2^64 times, or closed
            os.eventfd_write(self._wake, 1)

    def fileno(self) -> int:
        return self._wake

    def take(self, woken: bool = True) -> list[T]:
        """All that is here, without waiting. `woken`: whether `fileno` has something to read."""
        if woken:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        found: list[T] = []
        while not self._events.empty():  # nobody else takes from it
            found.append(self._events.get_nowait())
        return found

    def close(self) -> None:
        wake, self._wake = self._wake, -1  # its number may be another file's from now on
        os.close(wake)


class Looks:
    """The sleep of a channel thread. Reads and events of a stream wake nobody: while there are some
    it looks every 0.2 ms, and every 1 ms once nothing has come for 8 ms. Each look may take the GIL
    from SGLang's scheduler."""

    def __init__(self, poller: zmq.Poller, tick: float) -> None:
        self._poller, self._tick_ms, self._came = poller, int(tick * 1000), 0.0

    def wait(self, looking: bool) -> list[Any]:
        """What is ready now. `looking`: whether there is something to look at."""
        if looking and time.monotonic() - self._came < EAGER:
            ready = self._poller.poll(0)
            if not ready:
                time.sleep(EAGER_LOOK)
        else:
            ready = self._poller.poll(LOOK_MS if looking else self._tick_ms)
        if ready:
            self._came = time.monotonic()
        return [at for at, _ in ready]


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, times: Times
) -> zmq.Socket[bytes]:
    """A message is delivered within `times.delivery` or lost, with its connection."""
    socket = context.socket(kind)
    limit = int(times.delivery * 1000)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.TCP_MAXRT, limit)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(limit * HEARTBEAT))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, limit)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    return socket


def endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
