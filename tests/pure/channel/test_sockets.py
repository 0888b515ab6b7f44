"""The sockets and events of a channel thread, and how often the thread polls."""

from __future__ import annotations

import multiprocessing as mp
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from rig.channel.threads import wait_for
from zmq.utils.monitor import parse_monitor_message

from sglang_mixkv.channel import sockets
from sglang_mixkv.channel.messages import MAX_BYTES
from sglang_mixkv.channel.sockets import EventQueue, Poller, new_context, new_socket
from sglang_mixkv.channel.times import Times


@pytest.fixture
def queue() -> Iterator[EventQueue[int]]:
    made: EventQueue[int] = EventQueue()
    yield made
    os.close(made.fileno())


def is_woken(queue: EventQueue[int]) -> bool:
    return bool(select.select([queue.fileno()], [], [], 0)[0])


def test_events_without_a_wake_up_keep_their_order(queue: EventQueue[int]) -> None:
    queue.put(1, wake=False)
    assert not is_woken(queue)
    queue.put(2)
    assert is_woken(queue)
    assert queue.take([queue.fileno()]) == [1, 2]
    assert not is_woken(queue)
    queue.put(3, wake=False)
    assert queue.take([]) == [3]


def test_an_event_ends_the_sleep(queue: EventQueue[int]) -> None:
    poller = Poller()
    poller.register(queue.fileno())
    began, timer = time.monotonic(), threading.Timer(0.05, queue.put, [1])
    timer.start()
    assert poller.poll(60_000) == [queue.fileno()]
    assert time.monotonic() - began < 60
    timer.join()


def test_the_poller_polls_less_often_when_idle(
    queue: EventQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [100.0], list[float]()
    monkeypatch.setattr(sockets.time, "monotonic", lambda: now[0])
    poller = Poller()
    poller.register(queue.fileno())
    real = poller.poll
    monkeypatch.setattr(poller, "poll", lambda ms: asked.append(ms) or real(min(ms, 1)))
    for passed in (0, 0.9 * sockets.EAGER, 0.2 * sockets.EAGER):
        now[0] += passed
        if not passed:
            queue.put(1)
        assert bool(poller.wait(30, True)) is (passed == 0)
        queue.take([queue.fileno()])
    poller.wait(30, False)
    assert asked == [sockets.IDLE_MS, sockets.EAGER_MS, sockets.IDLE_MS, 30_000]
    assert (sockets.EAGER, sockets.EAGER_MS, sockets.IDLE_MS) == (0.008, 0.2, 1)


@pytest.mark.parametrize("timeout_ms", [0, 0.2, 0.999, 1, 30, 1500])
def test_the_poller_sleeps_for_the_given_time(
    timeout_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poller sleeps once for the given time, even below epoll_wait's resolution of 1 ms.

    With a timeout of 0, it does not sleep.
    """
    slept = list[float]()

    def ppoll(files: Any, count: int, timeout: bytes, mask: None) -> int:
        seconds, nanoseconds = struct.unpack("qq", timeout)
        assert seconds == 0
        slept.append(nanoseconds / 1e6)
        return 0

    def epoll_wait(files: int, found: Any, most: int, timeout_ms: int) -> int:
        slept.append(timeout_ms)
        return 0

    fakes = SimpleNamespace(ppoll=ppoll, epoll_wait=epoll_wait)
    monkeypatch.setattr(sockets, "_SLEEPS", fakes)
    assert Poller().poll(timeout_ms) == []
    assert slept == [pytest.approx(timeout_ms)] * bool(timeout_ms)


@pytest.mark.parametrize("timeout_ms", [0.9, 10_000])
def test_a_file_that_is_readable_ends_the_sleep(
    timeout_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A readable file ends the poller's sleep.

    The test checks the result of the system call, since a sleep this short cannot be timed.
    """
    real, named = sockets._SLEEPS, list[int]()
    calls = {
        name: lambda *args, name=name: named.append(getattr(real, name)(*args)) or named[-1]
        for name in ("ppoll", "epoll_wait")
    }
    monkeypatch.setattr(sockets, "_SLEEPS", SimpleNamespace(**calls))
    queue, poller = EventQueue[int](), Poller()
    poller.register(queue.fileno())
    queue.put(1)
    assert poller.poll(timeout_ms) == [queue.fileno()]
    assert named == [1]
    os.close(queue.fileno())


@pytest.mark.parametrize("timeout_ms", [0.9, 10_000])
def test_a_message_that_a_query_finds_ends_the_poll_at_once(
    timeout_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poller does not sleep if a socket has a message that the kernel does not report.

    The test makes a sleep impossible, since its result would be the same.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        router, poller = context.socket(zmq.ROUTER), Poller()
        dealer.connect(f"tcp://{HOST}:{router.bind_to_random_port(f'tcp://{HOST}')}")
        dealer.send(b"here")
        router.send_multipart([router.recv_multipart()[0], b"there"])
        assert dealer.poll(10_000)  # resets the socket's file
        poller.register(dealer)
        monkeypatch.setattr(sockets, "_SLEEPS", None)
        assert poller.poll(timeout_ms) == [dealer]
        router.close()


def test_no_file_of_the_channel_is_inherited(queue: EventQueue[int]) -> None:
    """A child process gets neither the queue's nor the poller's file, which would stay open."""
    poller = Poller()
    for file in (queue.fileno(), poller._epoll_fd):
        assert not os.get_inheritable(file)


def test_the_next_poll_finds_the_remaining_files() -> None:
    queues, poller = [EventQueue[int]() for _ in range(2 * sockets._MOST + 1)], Poller()
    for one in queues:
        poller.register(one.fileno())
        one.put(1)
    found = list[int]()
    for most in (sockets._MOST, sockets._MOST, 1):
        ready = poller.poll(1000)
        assert len(ready) == most
        found += ready
        for one in queues:
            one.take(ready)
    assert sorted(found) == sorted(one.fileno() for one in queues)
    assert poller.poll(0) == []
    for one in queues:
        os.close(one.fileno())


HOST, FORK = "127.0.0.1", mp.get_context("fork")


@pytest.mark.parametrize(("host", "is_v6"), [(HOST, 0), (f"tcp://{HOST}:1", 1), ("::1", 1)])
@pytest.mark.parametrize("patience", [0.1, 1.0, 60.0])
def test_a_socket_has_the_documented_timeouts(host: str, is_v6: int, patience: float) -> None:
    """A socket has the options and timeouts of docs/protocol.md."""
    context = new_context()
    made = new_socket(context, zmq.DEALER, host, Times(patience))
    found = {name: made.getsockopt(getattr(zmq, name)) for name in OPTIONS}
    assert found == OPTIONS | {"TCP_MAXRT": int(5000 * patience), "IPV6": is_v6}
    assert context.get(zmq.MAX_SOCKETS) == 16384
    context.destroy(linger=0)


OPTIONS = {
    "TYPE": zmq.DEALER, "LINGER": 0, "MAXMSGSIZE": 4096, "TCP_MAXRT": 5000, "IPV6": 0,
    "TCP_KEEPALIVE": 1, "TCP_KEEPALIVE_IDLE": 2, "TCP_KEEPALIVE_INTVL": 2,
    "CONNECT_TIMEOUT": 2000, "RECONNECT_IVL": 100, "RECONNECT_IVL_MAX": 2000,
}  # fmt: skip


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    """Yield a rank's ROUTER socket, which drops messages that take longer than half a second."""
    context = new_context()
    socket = new_socket(context, zmq.ROUTER, HOST, Times(0.1))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    yield socket
    context.destroy(linger=0)


def test_a_too_long_message_closes_its_connection(
    router: zmq.Socket[bytes],
) -> None:
    port = router.bind_to_random_port(f"tcp://{HOST}")
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(f"tcp://{HOST}:{port}")
        peer.send(bytes(MAX_BYTES))
        assert router.poll(10_000)
        assert len(router.recv_multipart()[1]) == MAX_BYTES
        peer.send(bytes(MAX_BYTES + 1))
        assert not router.poll(300)


def test_an_undeliverable_message_does_not_delay_closing() -> None:
    """Closing a socket and its context does not wait for a message to a peer that is gone."""
    context = new_context()
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        dealer = new_socket(context, zmq.DEALER, HOST, Times())
        dealer.connect(f"tcp://{HOST}:{unused.getsockname()[1]}")
        dealer.send(b"for a closed port", zmq.NOBLOCK)
        dealer.close()
        ending = threading.Thread(target=context.term, daemon=True)
        ending.start()
        ending.join(10)
        assert not ending.is_alive()


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.ROUTER])
def test_no_socket_sends_heartbeats(kind: int) -> None:
    with new_context() as context, new_socket(context, kind, HOST, Times()) as socket:
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0


KEEPALIVE, ESTABLISHED = "02", "01"


def timers(port: int) -> list[tuple[str, int]]:
    """Return both ends' TCP timers: their kind, and the milliseconds until they fire."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [line for line in lines if line[3] == ESTABLISHED and f":{port:04X}" in " ".join(line)]
    found = [line[5].split(":") for line in ends]
    return [(kind, int(when, 16) * 10) for kind, when in found]


def test_idle_connections_use_tcp_keepalive(router: zmq.Socket[bytes]) -> None:
    port = router.bind_to_random_port(f"tcp://{HOST}")
    context = new_context()
    dealer = new_socket(context, zmq.DEALER, HOST, Times())
    dealer.connect(f"tcp://{HOST}:{port}")
    dealer.send(b"here")
    assert router.poll(10_000)
    assert wait_for(lambda: [kind for kind, _ in timers(port)] == [KEEPALIVE] * 2)
    assert all(when <= 1000 * sockets.KEEPALIVE for _, when in timers(port))
    context.destroy(linger=0)


def test_a_failed_connection_attempt_is_repeated_soon() -> None:
    """A connection attempt without an answer is repeated soon, not at the kernel's long intervals.

    The test's listener drops all attempts, since its queue is full.
    """
    context = new_context()
    with socket.create_server((HOST, 0), backlog=0) as full, socket.socket() as first:
        first.connect(full.getsockname())
        dealer = new_socket(context, zmq.DEALER, HOST, Times())
        monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        dealer.connect(f"tcp://{HOST}:{full.getsockname()[1]}")
        assert monitor.poll(10_000)
        event = parse_monitor_message(monitor.recv_multipart())["event"]
        assert event == zmq.EVENT_CONNECT_RETRIED
        dealer.disable_monitor()
        context.destroy(linger=0)
