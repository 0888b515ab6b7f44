"""What wakes a channel thread, and how often it polls."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from sglang_mixkv.channel import sockets
from sglang_mixkv.channel.sockets import Inlet, Looks


@pytest.fixture
def inlet() -> Iterator[Inlet[int]]:
    made: Inlet[int] = Inlet()
    yield made
    made.close()


def is_woken(inlet: Inlet[int]) -> bool:
    return bool(select.select([inlet.fileno()], [], [], 0)[0])


def test_what_wakes_nobody_comes_with_the_next_event_in_order(inlet: Inlet[int]) -> None:
    inlet.put(1, wake=False)
    assert not is_woken(inlet)
    inlet.put(2)
    assert is_woken(inlet)
    assert inlet.take(woken=True) == [1, 2]
    assert not is_woken(inlet)


def test_what_wakes_nobody_is_there_for_who_looks(inlet: Inlet[int]) -> None:
    inlet.put(1, wake=False)
    assert inlet.take(woken=False) == [1]
    assert inlet.take(woken=False) == []


def looks_on(inlet: Inlet[int], tick: float) -> Looks:
    poller = zmq.Poller()
    poller.register(inlet.fileno(), zmq.POLLIN)
    return Looks(poller, tick)


def test_a_thread_with_nothing_to_look_at_sleeps_until_it_is_woken(inlet: Inlet[int]) -> None:
    looks, start = looks_on(inlet, 30), time.monotonic()
    timer = threading.Timer(0.05, inlet.put, [1])
    timer.start()
    assert looks.wait(False) == [inlet.fileno()]
    assert 0.04 < time.monotonic() - start < 20
    timer.join()


def test_it_looks_less_often_when_nothing_comes(
    inlet: Inlet[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of 0.2 ms at first; then in those of zmq, in which a message wakes it."""
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(sockets.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sockets.time, "sleep", slept.append)
    looks = looks_on(inlet, 30)
    inlet.put(1)
    assert looks.wait(True) == [inlet.fileno()]
    inlet.take()
    now[0] += 0.9 * sockets.EAGER
    assert looks.wait(True) == []
    assert slept == [sockets.EAGER_LOOK]
    now[0] += 0.2 * sockets.EAGER
    assert looks.wait(True) == []
    assert len(slept) == 1
    inlet.put(2)
    assert looks.wait(True) == [inlet.fileno()]
    inlet.take()
    assert looks.wait(True) == []
    assert len(slept) == 2, "what came may be followed by more"
