"""The engine over TCP: what all threads have in flight, and a stuck engine's successor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sglang_mixkv.transfer.bounded import MOST_ENGINES, BoundedEngine

PEER = "peer:1"


class SlowEngine:
    """Counts the ranges that are in flight over all threads. `code`: what a write returns.

    `gates`: a call of so many ranges waits there; `together`: all calls leave at once.
    """

    def __init__(self, code: int = 0, probe: int = 0) -> None:
        self.code, self.probe = code, probe
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.calls: list[int] = []
        self.memory: dict[int, int] = {}
        self.gates: dict[int, threading.Event] = {}
        self.together: threading.Barrier | None = None

    def batch_transfer_sync(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int:  # fmt: skip
        assert len(buffers) == len(peer_buffer_addresses) == len(lengths)
        with self.lock:
            self.calls.append(len(lengths))
            self.now += len(lengths)
            self.most = max(self.most, self.now)
        if len(lengths) in self.gates:
            self.gates[len(lengths)].wait(30)
        elif self.together is not None:
            self.together.wait(30)
        else:
            time.sleep(0.002)
        with self.lock:
            self.now -= len(lengths)
        return self.code

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        self.memory.update(zip(ptrs, lengths, strict=True))
        return 0

    def batch_deregister(self, ptrs: list[int]) -> int:
        for ptr in ptrs:
            del self.memory[ptr]
        return 0

    def send_probe(self, session: str) -> int:
        assert session == PEER
        return self.probe


def bounded(engine: SlowEngine, limit: int = 100) -> tuple[BoundedEngine, list[SlowEngine]]:
    """With this engine first, and the engines made after it."""
    made: list[SlowEngine] = []

    def make() -> SlowEngine:
        made.append(SlowEngine(engine.code if len(made) else 0))
        return made[-1]

    return BoundedEngine(engine, make, limit), made


def write(engine: BoundedEngine | SlowEngine, count: int) -> int:
    return engine.batch_transfer_sync(PEER, [1] * count, [2] * count, [3] * count)


def at_once(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("guarded", [True, False])
def test_all_threads_together_stay_within_the_limit(guarded: bool) -> None:
    engine = SlowEngine()
    into = bounded(engine)[0] if guarded else engine
    at_once([lambda n=n: write(into, n) for n in (60, 70, 100, 30, 10, 90) * 3])
    assert sum(engine.calls) == 360 * 3
    assert (engine.most <= 100) is guarded


def test_a_call_above_the_limit_is_cut() -> None:
    engine = SlowEngine()
    assert write(bounded(engine)[0], 250) == 0
    assert engine.calls == [100, 100, 50]


def test_a_large_call_is_not_passed_by() -> None:
    """A small call that would fit does not overtake a large one that waits for room."""
    engine = SlowEngine()
    engine.gates = {40: threading.Event()}
    into, _ = bounded(engine)
    threads = [threading.Thread(target=write, args=(into, n)) for n in (40, 100, 20)]
    for number, thread in enumerate(threads):
        thread.start()
        time.sleep(0.05)
        assert len(engine.calls) == 1, f"call {number} went ahead"
    engine.gates[40].set()
    for thread in threads:
        thread.join(30)
    assert engine.calls == [40, 100, 20]


def test_an_engine_that_fails_towards_a_living_peer_is_replaced() -> None:
    engine = SlowEngine(code=-1)
    into, made = bounded(engine)
    into.batch_register([16, 32, 64], [8, 8, 8])
    into.batch_deregister([32])
    assert write(into, 250) == -1
    assert engine.calls == [100], "nothing after the failure, and nothing of it again"
    assert [one.memory for one in made] == [{16: 8, 64: 8}]
    assert write(into, 5) == 0
    assert made[0].calls == [5]


def test_an_engine_whose_peer_is_away_stays() -> None:
    into, made = bounded(SlowEngine(code=-1, probe=-102))
    assert write(into, 5) == -1
    assert not made


def test_threads_that_fail_together_make_one_engine() -> None:
    engine = SlowEngine(code=-1)
    engine.together = threading.Barrier(5)
    into, made = bounded(engine)
    at_once([lambda: write(into, 20)] * 5)
    assert engine.calls == [20] * 5
    assert len(made) == 1


def test_engines_are_not_made_without_end() -> None:
    engine = SlowEngine(code=-1)
    made = []

    def make() -> SlowEngine:
        made.append(SlowEngine(code=-1))
        return made[-1]

    into = BoundedEngine(engine, make)
    for _ in range(MOST_ENGINES + 3):
        assert write(into, 1) == -1
    assert len(made) == MOST_ENGINES


def test_a_failure_to_make_an_engine_is_no_exception() -> None:
    def make() -> SlowEngine:
        raise RuntimeError("no engine")

    engine = SlowEngine(code=-1)
    into = BoundedEngine(engine, make)
    assert (write(into, 1), write(into, 2)) == (-1, -1)
    assert engine.calls == [1, 2]
