"""The channel's threads seldom give up Python's GIL, since beside a thread that computes in Python
it takes 5 ms each time to get it back."""

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
QUIET_S = 0.01  # in which what was said last is done
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
    """select.epoll, which cannot be derived from."""

    def __init__(self) -> None:
        self._real = real()
        self.poll = counted(self._real.poll)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Library:
    """A ctypes library that gives up the GIL in each call."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return counted(getattr(self._real, name))


real = select.epoll


class Later(OnDevice):
    """Each batch is asked for some times before it has ended, however busy this machine is."""

    def start(self, *what: Any) -> Ticket:
        ticket, asked = super().start(*what), itertools.count()
        over = ticket.over
        ticket.done = lambda: next(asked) > 3 and over()  # type: ignore[method-assign]
        return ticket


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make both sides, whose copies are batches on a device. No tick comes in between."""
    monkeypatch.setattr(loop, "TICK", 60.0)
    monkeypatch.setattr(_Side, "device", Later)
    monkeypatch.setattr(select, "epoll", Epoll)
    monkeypatch.setattr(zmq.Context, "_socket_class", Socket)
    monkeypatch.setattr(sockets, "_SLEEPS", Library(sockets._SLEEPS))
    for module, name in ((os, "eventfd_read"), (os, "eventfd_write"), (time, "sleep")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    with Channel(Times(20)) as one:
        yield one


def test_a_batch_gives_up_the_gil_only_to_sleep_and_for_messages(channel: Channel) -> None:
    """Prefill is woken by a chunk, announces it by a message of two frames, and is woken by an ACK
    of two. Decode is woken by the READY, answers it, and looks once whether its read has ended. In
    between a batch is packed and unpacked, whose end is seen before the thread sleeps. The fewest
    calls of several tries count, since libzmq sometimes wakes a thread for reasons of its own, and
    no exact number of sleeps, since a message that comes early enough spares one."""
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


def test_work_in_flight_is_polled_often_from_its_beginning(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event can only be polled, so this holds even if no file has been readable for long."""
    monkeypatch.setattr(Later, "took", 1e-3)  # longer than a thread asks before it sleeps
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
