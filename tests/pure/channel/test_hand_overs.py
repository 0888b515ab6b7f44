"""The channel threads seldom release the GIL.

It takes a thread 5 ms to acquire the GIL again while another thread runs Python code.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import zmq
from rig.channel.on_device import OnDevice, Ticket
from rig.channel.threads import SEGMENT, Channel, Event, _Side, wait_for

from sglang_mixkv.channel import loop, sockets
from sglang_mixkv.channel.times import Times

TRIES = 20
QUIET_S = 0.01  # long enough for both threads to handle the last messages
counts = dict[str, Counter[str]]()


def counted(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def counting(*given: Any, **named: Any) -> Any:
        try:
            return call(*given, **named)
        finally:
            if (mine := counts.get(threading.current_thread().name)) is not None:
                mine[call.__name__] += 1

    return counting


class Socket(zmq.Socket):  # type: ignore[type-arg]
    send, recv = counted(zmq.Socket.send), counted(zmq.Socket.recv)


class Epoll:
    """A wrapper of select.epoll, which cannot be subclassed."""

    def __init__(self) -> None:
        self._real = real()
        self.poll = counted(self._real.poll)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Library:
    """A ctypes library that counts its calls, since each of them releases the GIL."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return counted(getattr(self._real, name))


real = select.epoll


class Later(OnDevice):
    """A device whose batches end only after several polls, however busy this machine is."""

    def start(self, *what: Any) -> Ticket:
        ticket, asked = super().start(*what), itertools.count()
        over = ticket.over
        ticket.done = lambda: next(asked) > 3 and over()  # type: ignore[method-assign]
        return ticket


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make both sides of a channel, which copy in batches on a device.

    The tick is longer than a test.
    """
    monkeypatch.setattr(loop, "TICK", 60.0)
    monkeypatch.setattr(_Side, "device", Later)
    monkeypatch.setattr(select, "epoll", Epoll)
    monkeypatch.setattr(zmq.Context, "_socket_class", Socket)
    monkeypatch.setattr(sockets, "_SLEEPS", Library(sockets._SLEEPS))
    for module, name in ((os, "eventfd_read"), (os, "eventfd_write"), (time, "sleep")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    with Channel(Times(20)) as one:
        yield one


def test_a_batch_releases_the_gil_only_to_sleep_and_send(channel: Channel) -> None:
    """The channel threads release the GIL only to sleep, and to send and receive messages.

    A chunk wakes prefill's thread, which sends a READY of two frames. An ACK of two frames wakes it
    again. The READY wakes decode's thread, which polls its read once and answers. The ends of
    the pack and the unpack are noticed before a thread sleeps.

    The test uses the fewest calls of several tries, since libzmq sometimes wakes a thread for
    internal reasons. The number of sleeps may be lower, since a message that comes early enough
    saves a sleep.
    """
    found = dict[str, list[Counter[str]]](prefill=[], decode=[])
    for room in range(TRIES):
        handle = channel.open(room, SEGMENT)
        time.sleep(QUIET_S)
        counts.update({f"mixkv-{side}": Counter() for side in found})
        sent = channel.prefill.send(room, SEGMENT)
        assert channel.state(handle) == ("warm", "")
        time.sleep(QUIET_S)
        for side, seen in found.items():
            seen.append(counts.pop(f"mixkv-{side}"))
        channel.end(sent, handle)
    fewest = {side: min(seen, key=Counter.total) for side, seen in found.items()}
    assert fewest["prefill"] <= Counter(epoll_wait=2, send=2, recv=2)
    assert fewest["decode"] <= Counter(epoll_wait=1, ppoll=1, send=1, recv=1)


def test_pending_work_is_polled_often_at_once(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread polls often as soon as a copy or an event is pending.

    An event can only be polled, so the thread does this even if no file has been readable for a
    while.
    """
    monkeypatch.setattr(Later, "took", 1e-3)  # longer than a thread polls before it sleeps
    monkeypatch.setattr(sockets, "IDLE_MS", 200)
    taken = []
    for room in range(TRIES // 4):
        event, handle = Event(), channel.open(room, SEGMENT)
        sent = channel.prefill.send(room, SEGMENT, events=(event,))
        time.sleep(2 * sockets.EAGER)
        event.done = True
        assert wait_for(lambda: not channel.prefill.channel._held)
        began = time.monotonic()
        assert channel.state(handle) == ("warm", "")
        taken.append(time.monotonic() - began)
        channel.end(sent, handle)
    assert min(taken) < 0.1
