"""Mooncake over TCP and RDMA: what all threads have in flight, asynchronous writes, and the
engine that takes the place of a stuck one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from sglang_mixkv.kv.ranges import Blocks
from sglang_mixkv.transport import mooncake as module
from sglang_mixkv.transport.mooncake import (
    ASYNCHRONOUS,
    IN_FLIGHT,
    MOST_ENGINES,
    MOST_IN_VAIN,
    WAITED_FOR,
    Begun,
    Engines,
    InFlight,
    Mooncake,
    SharedEngine,
)

PEER, OTHER = "peer:1", "peer:2"


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
        self.engine = OwnEngine(self)

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
        assert session in (PEER, OTHER)
        return self.probe


class OwnEngine:
    """Mooncake's own: writes that are begun, and asked about until they have ended.

    `rejected`: what it returns instead of a number; `state`: what becomes of a write, after
    it was asked about `later` times.
    """

    def __init__(self, owner: SlowEngine) -> None:
        self.owner = owner
        self.rejected: int | None = None
        self.state, self.later = 1, 2
        self.asked: dict[int, int] = {}

    def transfer_submit_write(self, session: str, src: int, dst: int, length: int) -> int:
        assert session == PEER
        if self.rejected is not None:
            return self.rejected
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


def blocks(count: int) -> Blocks:
    return Blocks(*(np.full(count, value) for value in (1, 2, 3)))


@dataclass
class Wired:
    """The transport over this engine, and SGLang's own way to it.

    `fresh`: makes an engine that takes its place; `made`: those so far.
    """

    engine: SlowEngine
    limit: int = 100
    tcp: bool = True
    fresh: Callable[[], SlowEngine] = SlowEngine
    made: list[SlowEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limiter = limiter = InFlight(self.limit)
        self.engines = Engines(self.engine, self.make)
        self.transport = Mooncake(self.engines, limiter if self.tcp else None)
        self.shared = SharedEngine(self.engines, self.transport, limiter)

    def make(self) -> SlowEngine:
        self.made.append(self.fresh())
        return self.made[-1]

    def write(self, count: int, session: str = PEER) -> int:
        return self.transport.wait(self.transport.write(session, blocks(count)))

    def write_as_sglang(self, count: int) -> int:
        return self.shared.batch_transfer_sync(PEER, [1] * count, [2] * count, [3] * count)

    def begin(self, count: int) -> Begun | None:
        """An asynchronous write. None: it was waited for."""
        handle = self.transport.write(PEER, blocks(count), overlap=True)
        return handle if isinstance(handle, Begun) else None


WAYS = [Wired.write, Wired.write_as_sglang]
Way = Callable[[Wired, int], int]


def at_once(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("limit", [100, 1000])
def test_all_threads_together_stay_within_the_limit(limit: int) -> None:
    """SGLang's writes and the plugin's; a limit that is not one shows that it is seen."""
    wired = Wired(engine := SlowEngine(), limit)
    sizes = (60, 70, 100, 30, 10, 90)
    if limit > sum(sizes) * 2:
        engine.together = threading.Barrier(len(sizes) * 2)
    at_once([lambda n=n, way=way: way(wired, n) for n in sizes for way in WAYS])
    assert sum(engine.calls) == 360 * 2
    assert (engine.most <= 100) is (limit == 100)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_above_the_limit_is_cut(way: Way) -> None:
    assert way(Wired(engine := SlowEngine()), 250) == 0
    assert engine.calls == [100, 100, 50]


def test_over_rdma_a_write_is_one_call() -> None:
    """However many ranges; none is asynchronous, and a failure does not replace the engine."""
    wired = Wired(engine := SlowEngine(), tcp=False)
    assert (wired.write(2500), wired.begin(7), engine.calls) == (0, None, [2500, 7])
    assert not wired.transport.limits.overlaps
    engine.code = -1
    assert (wired.write(3), wired.made) == (-1, [])


def test_ranges_of_any_length_keep_theirs() -> None:
    """Lists are made once for ranges that are alike, and cut like the others."""
    found: list[int] = []
    wired = Wired(engine := SlowEngine())
    engine.batch_transfer_sync = lambda *call: found.extend(call[-1]) or 0  # type: ignore[method-assign]
    lengths = np.arange(1, 251)
    handle = wired.transport.write(PEER, Blocks(lengths, lengths, lengths))
    assert (wired.transport.wait(handle), found) == (0, lengths.tolist())


def test_a_large_call_is_not_passed_by() -> None:
    """A small call that would fit does not overtake a large one that waits for room."""
    wired = Wired(engine := SlowEngine())
    engine.gates = {40: threading.Event()}
    threads = [threading.Thread(target=wired.write, args=(n,)) for n in (40, 100, 20)]
    threads[0].start()
    deadline = time.monotonic() + 30
    while not engine.calls and time.monotonic() < deadline:
        time.sleep(0.001)
    for number, thread in enumerate(threads[1:], 1):
        thread.start()
        time.sleep(0.05)
        assert len(engine.calls) == 1, f"call {number} went ahead"
    engine.gates[40].set()
    for thread in threads:
        thread.join(30)
    assert engine.calls == [40, 100, 20]


def test_a_peer_that_hangs_takes_nobody_elses_share() -> None:
    wired = Wired(engine := SlowEngine())
    engine.gates = {100: threading.Event()}
    hung = threading.Thread(target=wired.write, args=(100,))
    hung.start()
    begun = wired.begin(ASYNCHRONOUS)
    assert (wired.write(99, OTHER), begun is not None, hung.is_alive()) == (0, True, True)
    engine.gates[100].set()
    hung.join(30)
    assert not wired.limiter._waited_for
    assert not wired.limiter._turns


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_fails_towards_a_living_peer_is_replaced(way: Way) -> None:
    wired = Wired(engine := SlowEngine(code=-1))
    wired.shared.batch_register([16, 32], [8, 8])
    wired.transport.register(64, 8)
    wired.shared.batch_deregister([32])
    assert way(wired, 250) == -1
    assert engine.calls == [100], "nothing after the failure, and nothing of it again"
    assert [one.memory for one in wired.made] == [{16: 8, 64: 8}]
    assert way(wired, 5) == 0
    assert wired.made[0].calls == [5]


def test_an_engine_whose_peer_is_away_stays() -> None:
    wired = Wired(SlowEngine(code=-1, probe=-102))
    assert (wired.write(5), wired.made, wired.transport.probe(PEER)) == (-1, [], False)
    assert Wired(SlowEngine()).transport.probe(PEER)
    broken = Wired(SlowEngine())
    broken.engine.send_probe = None  # type: ignore[assignment, method-assign]
    assert not broken.transport.probe(PEER)


def test_threads_that_fail_together_make_one_engine() -> None:
    wired = Wired(engine := SlowEngine(code=-1))
    engine.together = threading.Barrier(5)
    at_once([lambda: wired.write(20)] * 5)
    assert engine.calls == [20] * 5
    assert len(wired.made) == 1


def test_a_peer_that_fresh_engines_fail_to_does_not_use_them_up() -> None:
    wired = Wired(SlowEngine(code=-1), fresh=lambda: SlowEngine(code=-1))
    for _ in range(5):
        assert wired.write(1) == -1
    wired.engines.note(wired.engine, PEER, 0)  # a late success of one that was replaced
    assert wired.write(1) == -1
    assert len(wired.made) == MOST_IN_VAIN
    wired.write(1, OTHER)
    assert len(wired.made) == MOST_IN_VAIN + 1, "there is one for another"


def test_engines_are_not_made_without_end() -> None:
    """Each is right at first, and fails then."""
    wired = Wired(SlowEngine(code=-1))
    for _ in range(MOST_ENGINES + 3):
        wired.engines.current.code = -1
        assert wired.write(1) == -1
        wired.write(1)
    assert len(wired.made) == MOST_ENGINES


def test_a_failure_to_make_an_engine_is_no_exception() -> None:
    def fresh() -> SlowEngine:
        raise RuntimeError("no engine")

    wired = Wired(engine := SlowEngine(code=-1), fresh=fresh)
    assert (wired.write(1), wired.write(2)) == (-1, -1)
    assert engine.calls == [1, 2]


def test_memory_that_cannot_be_registered_is_a_memory_error() -> None:
    wired = Wired(engine := SlowEngine())
    engine.batch_register = lambda *_: -5  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="returned -5"):
        wired.transport.register(64, 8)


def test_what_the_plugin_does_not_know_is_the_engines_own() -> None:
    """SGLang asks the shared engine for more than writes; of the one in use."""
    wired = Wired(SlowEngine(code=-1))
    assert wired.shared.memory is wired.engine.memory
    wired.write(1)
    assert wired.shared.memory is wired.made[0].memory


# ---------------------------------------------------------------- asynchronous writes


def test_a_begun_write_is_waited_for_later() -> None:
    wired = Wired(engine := SlowEngine())
    begun = wired.begin(3)
    assert begun is not None
    assert engine.now == 3
    assert wired.transport.wait(begun) == 0
    assert (engine.now, engine.calls, wired.made) == (0, [], [])
    assert set(engine.engine.asked.values()) == {3}


def test_begun_writes_have_a_share_of_what_may_be_in_flight() -> None:
    """What does not fit is not begun, and calls that wait do not wait for what was."""
    wired = Wired(engine := SlowEngine(), WAITED_FOR)
    held = [wired.begin(ASYNCHRONOUS - 1), wired.begin(1)]
    assert wired.begin(1) is None
    assert wired.write(WAITED_FOR) == 0
    assert engine.most == IN_FLIGHT == 1024
    assert held[1] is not None
    wired.transport.wait(held[1])
    assert wired.begin(2) is None
    assert wired.begin(1) is not None


@pytest.mark.parametrize("rejected", [0, -1, 2**64 - 1])
def test_a_write_that_was_rejected_has_failed(rejected: int) -> None:
    """Mooncake says so with 0, or with -1 in an unsigned number."""
    wired = Wired(engine := SlowEngine())
    engine.engine.rejected = rejected
    begun = wired.begin(2)
    assert begun is not None
    assert wired.transport.wait(begun) == -1
    assert len(wired.made) == 1, "the peer answers, so another engine takes its place"
    assert wired.begin(ASYNCHRONOUS) is not None, "its share is free again"


@pytest.mark.parametrize("state", [-1, -2, 2])
def test_a_begun_write_that_fails_replaces_the_engine(
    state: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where asking about it raises: nothing does inside SGLang's threads."""
    wired = Wired(engine := SlowEngine())
    engine.engine.state = state
    begun = wired.begin(2)
    assert begun is not None
    assert wired.transport.wait(begun) == -1
    assert len(wired.made) == 1
    assert ("what became of a write" in caplog.text) is (state == 2)


def test_writes_that_do_not_end_are_given_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from when they began: several hung writes take no longer than one."""
    monkeypatch.setattr(module, "GIVE_UP_S", 2)
    wired = Wired(engine := SlowEngine(probe=-102))
    engine.engine.later = 1 << 60
    hung = [wired.begin(2) for _ in range(4)]
    began = time.monotonic()
    assert [wired.transport.wait(one) for one in hung if one is not None] == [-1] * 4
    assert time.monotonic() - began < 2 * 2


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
    wired = Wired(engine := SlowEngine(code=-1))
    begun = wired.begin(2)
    assert wired.write(1) == -1
    assert len(wired.made) == 1
    assert begun is not None
    assert wired.transport.wait(begun) == 0
    assert set(engine.engine.asked.values()) == {3}


def test_threads_share_what_may_be_begun() -> None:
    """Each begins what it can and gives it back, a hundred times; in the end all is free."""
    wired = Wired(engine := SlowEngine())
    engine.engine.later = 0
    engine.batch_transfer_sync = lambda *_: 0  # type: ignore[method-assign]

    def begin_and_end() -> None:
        for _ in range(100):
            begun = wired.begin(50)
            if begun is not None:
                assert wired.transport.wait(begun) == 0

    at_once([begin_and_end] * 4)
    assert engine.most <= ASYNCHRONOUS
    assert wired.begin(ASYNCHRONOUS) is not None


def test_a_mooncake_without_such_writes_begins_none() -> None:
    wired = Wired(engine := SlowEngine())
    engine.engine = object()  # type: ignore[assignment]
    assert wired.begin(1) is None
