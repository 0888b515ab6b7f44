"""The channel thread's event queue, and ZMQ sockets that deliver a message within a known time or
lose it. Calls that do not sleep hold the GIL where possible (see draft/cuda.py): os, select and
pyzmq's `send` and `recv` release it; `getsockopt` and ctypes.PyDLL do not."""

from __future__ import annotations

import ctypes
import os
import platform
import queue
import select
import struct
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import zmq

from sglang_mixkv.channel.messages import MAX_BYTES
from sglang_mixkv.channel.times import Times

T = TypeVar("T")
Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
EAGER = 0.008  # seconds
EAGER_MS, IDLE_MS = 0.2, 1
# Integers, since an operation on pyzmq's enums takes as long as querying a socket.
IN, EVENTS, NOBLOCK = int(zmq.POLLIN), int(zmq.EVENTS), int(zmq.NOBLOCK)
BATCH = 64  # messages received per poll, or one from each ready socket if there are more
KEEPALIVE = 2  # seconds without a message, after which the kernel probes the peer
_SLEEPS, _KEEPS = ctypes.CDLL(None), ctypes.PyDLL(None)
_COUNT = ctypes.c_uint64(1)  # what an event adds to an eventfd
# The file descriptor in an epoll_event, a struct that Linux packs only on x86-64.
_READY = struct.Struct("4xi4x" if platform.machine() == "x86_64" else "8xi4x")
_MOST = 64  # file descriptors per poll; the next poll returns the rest
MAX_SOCKETS = 16384  # SGLang's own default for its context; libzmq's is 1,023


class EventQueue(Generic[T]):
    """A queue of events from any thread to one. `put` neither blocks nor releases the GIL; waking a
    sleeping thread costs the caller some 10 us."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, event: T, wake: bool = True) -> None:
        """Add an event. `wake`: wake the thread now; otherwise the thread takes the event later."""
        self._events.put(event)
        if wake:
            self.wake()

    def wake(self) -> None:
        _KEEPS.eventfd_write(self._wake, _COUNT)

    def fileno(self) -> int:
        return self._wake

    def take(self, ready: list[Any]) -> list[T]:
        """Return all queued events, without waiting. `ready`: the result of a poll."""
        if self._wake in ready:
            _KEEPS.eventfd_read(self._wake, ctypes.byref(ctypes.c_uint64()))
        found: list[T] = []
        while not self._events.empty():  # no other thread takes events
            found.append(self._events.get_nowait())
        return found


class Poller:
    """Polls many sockets, and queries only those where something happened.

    The kernel reports a socket through its `zmq.FD`, which is readable from a change of the socket
    until the next call on it. Such a call may hide earlier messages, so a socket is also queried if
    it is new, may have more messages, or was added to `used` since the last poll (each send)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._epoll_fd = self._epoll.fileno()
        pollfd = struct.pack("ihh", self._epoll_fd, select.POLLIN, 0)
        self._ppoll = ctypes.create_string_buffer(pollfd)
        self._sockets: dict[int, Socket] = {}
        self._found = ctypes.create_string_buffer(_READY.size * _MOST)
        self.used: set[Socket] = set()
        self.came = 0.0  # when something was last ready or done

    def register(self, at: Socket | int) -> None:
        self._epoll.register(at, select.EPOLLIN)
        if not isinstance(at, int):
            self._sockets[at.fileno()] = at
            self.used.add(at)

    def unregister(self, socket: Socket) -> None:
        self._epoll.unregister(socket)
        del self._sockets[socket.fileno()]
        self.used.discard(socket)

    def received(self, socket: Socket, most: int = BATCH) -> Iterator[zmq.Frame]:
        """Yield the first frame of each message of a ready socket, up to `most` of them. The caller
        receives the other frames. Most messages come alone, so query the socket after the first. A
        query takes a third as long as a `recv` without a message, twice as long as one with it."""
        for count in range(most):
            try:
                yield socket.recv(NOBLOCK, copy=False)
            except zmq.Again:  # none is left, or the connection has broken since
                break
            if not count and not has_message(socket):
                break
        else:
            return
        self.used.discard(socket)

    def wait(self, tick: float, outstanding: bool) -> list[Any]:
        """Sleep up to `tick` seconds or until a file is readable, and return what is ready. No file
        reports the end of a read or CUDA event, so while one is `outstanding` the thread polls:
        every 0.2 ms, but every 1 ms once nothing has arrived or started for 8 ms, since each poll
        may take the GIL from SGLang's scheduler."""
        timeout_ms = tick * 1000
        if outstanding:
            timeout_ms = EAGER_MS if time.monotonic() - self.came < EAGER else IDLE_MS
        if ready := self.poll(timeout_ms):
            self.came = time.monotonic()
        return ready

    def poll(self, timeout_ms: float) -> list[Any]:
        """Return what is ready: sockets with messages, and file descriptors. It may return early
        with nothing. It releases the GIL only to sleep: in ppoll if for less than a millisecond."""
        asked, ready = self.used, list[Any]()
        self.used = set()
        for socket in asked:
            if has_message(socket):
                ready.append(socket)
                self.used.add(socket)
        wait_ms = 0 if ready else int(timeout_ms)
        if not (ready or wait_ms) and timeout_ms:
            _SLEEPS.ppoll(self._ppoll, 1, struct.pack("qq", 0, int(timeout_ms * 1e6)), None)
        library = _SLEEPS if wait_ms else _KEEPS
        count = library.epoll_wait(self._epoll_fd, self._found, _MOST, wait_ms)
        for (fd,) in _READY.iter_unpack(memoryview(self._found)[: max(count, 0) * _READY.size]):
            named = self._sockets.get(fd)
            if named is None:
                ready.append(fd)
            elif named not in self.used and has_message(named):
                ready.append(named)
                self.used.add(named)
        return ready


def has_message(socket: Socket) -> bool:
    return bool(socket.getsockopt(EVENTS) & IN)  # type: ignore[operator]


def new_context() -> Context:
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def new_socket(context: Context, kind: int, host: str, times: Times) -> Socket:
    """Make a socket whose messages reach the peer's kernel within `times.delivery`, or are lost
    with their connection. The kernel checks idle connections (TCP keepalive).

    Connecting is retried every few seconds. The kernel alone would retry a silent host at growing
    intervals, up to a minute after its link is back."""
    socket = context.socket(kind)
    limit = int(times.delivery * 1000)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.TCP_MAXRT, limit)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    return socket


def endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
