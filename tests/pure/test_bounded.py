"""The engine over TCP: what all threads have in flight, and a stuck engine's successor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sglang_mixkv.transport import mooncake as module
from sglang_mixkv.transport.base import IN_FLIGHT, MAX_DESCRIPTORS, STARTED
from sglang_mixkv.transport.mooncake import MOST_ENGINES, BoundedEngine, Started

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
        self.engine = Mooncake(self)

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


class Mooncake:
    """Mooncake's own engine: writes that are begun, and asked about until they have ended.

    `turned_down`: what it returns instead of a number; `state`: what becomes of a write, after
    it was asked about `later` times.
    """

    def __init__(self, owner: SlowEngine) -> None:
        self.owner = owner
        self.turned_down: int | None = None
        self.state, self.later = 1, 2
        self.asked: dict[int, int] = {}

    def transfer_submit_write(self, session: str, src: int, dst: int, length: int) -> int:
        assert session == PEER
        if self.turned_down is not None:
            return self.turned_down
        with self.owner.lock:
            self.owner.now += 1
            self.owner.most = max(self.owner.most, self.owner.now)
            self.asked[number := 1000 + len(self.asked)] = 0
        return number

    def transfer_check_status(self, number: int) -> int:
        self.asked[number] += 1
        if self.asked[number] <= self.later:
            return 0
        with self.owner.lock:
            self.owner.now -= 1
        if self.state > 1:
            raise RuntimeError("no such write")
        return self.state


def bounded(engine: SlowEngine, limit: int = 100) -> tuple[BoundedEngine, list[SlowEngine]]:
    """With this engine first, and the engines made after it."""
    made: list[SlowEngine] = []

    def make() -> SlowEngine:
        made.append(SlowEngine(engine.code if len(made) else 0))
        return made[-1]

    return BoundedEngine(engine, make, limit), made


def write(engine: BoundedEngine | SlowEngine, count: int) -> int:
    return engine.batch_transfer_sync(PEER, [1] * count, [2] * count, [3] * count)


def start(engine: BoundedEngine, count: int) -> Started | None:
    return engine.start(PEER, [1] * count, [2] * count, [3] * count)


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


# ---------------------------------------------------------------- writes that go on by themselves


def test_a_started_write_is_waited_for_later() -> None:
    into, made = bounded(engine := SlowEngine())
    started = start(into, 3)
    assert started is not None
    assert engine.now == 3
    assert into.finish(started) == 0
    assert (engine.now, engine.calls, made) == (0, [], [])
    assert set(engine.engine.asked.values()) == {3}


def test_started_writes_have_a_share_of_what_may_be_in_flight() -> None:
    """What does not fit is not begun, and calls that wait do not wait for what was."""
    into, _ = bounded(engine := SlowEngine(), MAX_DESCRIPTORS)
    held = [start(into, STARTED - 1), start(into, 1)]
    assert start(into, 1) is None
    assert write(into, MAX_DESCRIPTORS) == 0
    assert engine.most == IN_FLIGHT == 1024
    assert held[1] is not None
    into.finish(held[1])
    assert start(into, 2) is None
    assert start(into, 1) is not None


@pytest.mark.parametrize("turned_down", [0, -1, 2**64 - 1])
def test_a_write_that_was_turned_down_has_failed(turned_down: int) -> None:
    """Mooncake says so with 0, or with -1 in an unsigned number."""
    into, made = bounded(engine := SlowEngine())
    engine.engine.turned_down = turned_down
    started = start(into, 2)
    assert started is not None
    assert into.finish(started) == -1
    assert len(made) == 1, "the peer answers, so another engine takes its place"
    assert start(into, STARTED) is not None, "its share is free again"


@pytest.mark.parametrize("state", [-1, -2, 2])
def test_a_started_write_that_fails_replaces_the_engine(
    state: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where asking about it raises: nothing does inside SGLang's threads."""
    into, made = bounded(engine := SlowEngine())
    engine.engine.state = state
    started = start(into, 2)
    assert started is not None
    assert into.finish(started) == -1
    assert len(made) == 1
    assert ("what became of a write" in caplog.text) is (state == 2)


def test_writes_that_do_not_end_are_given_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from when they began: several hung writes take no longer than one."""
    monkeypatch.setattr(module, "GIVE_UP_S", 0.5)
    into, _ = bounded(engine := SlowEngine(probe=-102))
    engine.engine.later = 1 << 60
    hung = [start(into, 2) for _ in range(4)]
    began = time.monotonic()
    assert [into.finish(one) for one in hung if one is not None] == [-1] * 4
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("said", "seconds"), [(None, 30), ("120", 120), ("1", 5), ("long", 30), ("", 30)]
)
def test_patience_is_mooncakes(
    said: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    if said is not None:
        monkeypatch.setenv("MC_TRANSFER_TIMEOUT", said)
    assert module.patience_s() == seconds


def test_a_write_is_asked_about_where_it_was_begun() -> None:
    """An engine that was replaced in between does not know it."""
    engine = SlowEngine(code=-1)
    into, made = bounded(engine)
    started = start(into, 2)
    assert write(into, 1) == -1
    assert len(made) == 1
    assert started is not None
    assert into.finish(started) == 0
    assert set(engine.engine.asked.values()) == {3}


def test_threads_share_what_may_be_started() -> None:
    """Each begins what it can and gives it back, a hundred times; in the end all is free."""
    into, _ = bounded(engine := SlowEngine())
    engine.engine.later = 0

    def begin_and_end() -> None:
        for _ in range(100):
            started = start(into, 50)
            if started is not None:
                assert into.finish(started) == 0

    at_once([begin_and_end] * 4)
    assert engine.most <= STARTED
    assert start(into, STARTED) is not None


def test_a_mooncake_without_such_writes_begins_none() -> None:
    into, _ = bounded(engine := SlowEngine())
    engine.engine = object()  # type: ignore[assignment]
    assert start(into, 1) is None
