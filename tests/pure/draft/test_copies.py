"""Copies on a device: which ones start, wait or are skipped, and how gates wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_mixkv.draft import copier
from sglang_mixkv.draft import gate as gate_module
from sglang_mixkv.draft.copier import Copy, GpuCopier, HeldBack
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.draft.slot_format import SlotCheck


class Batch:
    """A batch that stays in flight until the test ends it."""

    error = ""

    def __init__(self, kind: str, jobs: list[str]) -> None:
        self.kind, self.jobs, self.end = kind, jobs, threading.Event()

    def over(self) -> bool:
        return self.end.is_set()

    done = over

    @property
    def results(self) -> list[Any]:
        """Return each job's result: STALE if its name contains "stale"."""
        return [SlotCheck.STALE if "stale" in job else SlotCheck.OK for job in self.jobs]


class Device:
    """A device with the calls that the copier makes.

    A job is represented by its name. A job whose name ends with "!" cannot be prepared.
    """

    max_batch = 3

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.fails = False

    @property
    def can_start(self) -> bool:
        return sum(not batch.over() for batch in self.batches) < 2

    def start(self, kind: str, jobs: list[str]) -> Batch:
        if self.fails:
            raise RuntimeError("no device")
        self.batches.append(Batch(kind, jobs))
        return self.batches[-1]

    def job(self, pages: str, first: int, tokens: int, *slot: Any) -> str:
        if pages.endswith("!"):
            raise ValueError("outside the pool")
        return pages


class Copies:
    """A copier with its device and three gates.

    `start` takes the names of jobs, which start with the name of their request's gate.
    """

    def __init__(self) -> None:
        self.device, self.gates = Device(), {name: Gate() for name in "abc"}
        store: Any = SimpleNamespace(device=self.device, rows=SimpleNamespace(bytes_per_head=10))
        self.moved: list[int] = []
        self.took: list[float] = []
        self.copies = GpuCopier(store, self._moved)

    def _moved(self, size: int, seconds: float) -> None:
        self.moved.append(size)
        self.took.append(seconds)

    def start(self, *jobs: str) -> None:
        self.copies.start([self._copy(job) for job in jobs])

    def _copy(self, job: str) -> Copy:
        kind = "clear" if "clear" in job else "unpack"
        pages: Any = SimpleNamespace(on=lambda device: job)
        return Copy(kind, job, self.gates[job[0]], pages, 0, 1, range(1))

    def ended(self) -> dict[str, Any]:
        """Return each job's result, None for a job that did not run.

        Also check that no gate still refers to a batch that has ended.
        """
        found = list(self.copies.ended())
        flying = [batch for batch in self.device.batches if not batch.over()]
        assert all(batch in flying for gate in self.gates.values() for batch in gate.tickets)
        return {job: result for jobs, result in found for job in jobs}

    @property
    def flying(self) -> list[tuple[str, list[str]]]:
        return [(batch.kind, batch.jobs) for batch in self.device.batches if not batch.over()]


def test_requests_share_batches_and_two_are_in_flight() -> None:
    test = Copies()
    test.start("a1", "b1", "a2", "b2", "c1", "c2", "c3")
    assert test.flying == [("unpack", ["a1", "b1", "a2"]), ("unpack", ["b2", "c1", "c2"])]
    assert not test.copies.done
    assert test.copies.polled
    test.device.batches[0].end.set()
    assert test.copies.done
    assert test.ended() == dict.fromkeys(("a1", "b1", "a2"), SlotCheck.OK)
    assert test.flying[1] == ("unpack", ["c3"])
    assert test.copies.polled, "the ends of batches in flight must be polled"
    for batch in test.device.batches:
        batch.end.set()
    assert set(test.ended()) == {"b2", "c1", "c2", "c3"}
    assert not test.copies.polled
    test.start("a1", "b clear", "c1")
    assert test.flying == [("unpack", ["a1"]), ("clear", ["b clear"])], "one kind per batch"


class Raced(list[Any]):
    """A list to which another thread adds an item right after its items were read."""

    late: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        found, added = list(super().__iter__()), self.late
        self.late = ()
        self += added
        return iter(found)


def test_a_copy_that_ends_while_others_are_taken_is_not_lost() -> None:
    test = Copies()
    first, second, late = (
        (test._copy(job), result, 0.1)
        for job, result in (("a1", SlotCheck.OK), ("b1 stale", SlotCheck.STALE), ("c1", None))
    )
    test.copies._over = over = Raced([first, second])
    over.late = (late,)
    assert test.ended() == {"a1": SlotCheck.OK, "b1 stale": SlotCheck.STALE}
    assert test.copies.done
    assert test.ended() == {"c1": None}
    assert not test.copies.done


def test_moved_bytes_are_counted_except_for_clears() -> None:
    test, began = Copies(), time.perf_counter()
    test.start("a1", "b1 stale", "c1")
    test.start("a clear")
    for batch in test.device.batches:
        batch.end.set()
    found = list(test.copies.ended())
    assert found == [(["b1 stale"], SlotCheck.STALE), (["a1", "c1", "a clear"], SlotCheck.OK)]
    assert test.moved == [2 * 10]
    assert 0 < test.took[0] < time.perf_counter() - began


def test_the_error_of_a_failed_batch_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    test = Copies()
    test.start("a1", "b1", "c!")
    (batch,) = test.device.batches
    batch.error = "cuEventQuery: 719"
    batch.end.set()
    found = {job: str(result) for job, result in test.ended().items()}
    assert found == {"a1": batch.error, "b1": batch.error, "c!": "outside the pool"}
    assert [record.message.count(batch.error) for record in caplog.records] == [0, 1]


def test_jobs_with_a_closed_gate_are_skipped() -> None:
    test = Copies()
    test.gates["b"].close()
    test.start("a1", "b1", "c1")
    assert test.flying == [("unpack", ["a1", "c1"])]
    assert test.ended() == {"b1": None}
    test.gates["b"].close()
    test.start("b2")
    assert len(test.flying) == 1, "nothing is launched for closed gates alone"
    assert test.ended() == {"b2": None}


def test_a_gate_cannot_close_between_its_check_and_the_launch() -> None:
    """A gate's check, the launch of a batch and its registration happen in one step.

    A close comes before all three, or comes after them and waits for the batch.
    """

    class Unlocked(threading.Condition):
        def __exit__(self, *args: Any) -> None:
            super().__exit__(*args)
            time.sleep(0.05)

    test = Copies()
    test.gates["a"].lock = Unlocked(threading.Lock())
    real, closed, closing = test.device.start, threading.Event(), list[threading.Thread]()

    def close() -> None:
        test.gates["a"].close()
        closed.set()

    def start(kind: str, jobs: list[str]) -> Batch:
        closing.append(threading.Thread(target=close))
        closing[0].start()
        assert not closed.wait(0.05), "the gate was closed before the batch was launched"
        return real(kind, jobs)

    test.device.start = start  # type: ignore[method-assign]
    test.start("a1")
    assert not closed.wait(0.05)
    test.device.batches[0].end.set()
    assert closed.wait(10)
    closing[0].join()


@pytest.mark.parametrize("fails", ["device", "job"])
def test_a_job_that_cannot_start_fails_alone(fails: str) -> None:
    test = Copies()
    test.gates["b"].close()
    test.device.fails = fails == "device"
    test.start("a1", "b1", "c!" if fails == "job" else "c1")
    found = test.ended()
    assert found.pop("b1") is None
    assert isinstance(found.pop("c!" if fails == "job" else "c1"), Exception)
    assert len(found) == (fails == "device")
    assert test.gates["c"].try_close(), "no batch is in flight for this gate"
    test.device.fails = False
    test.start("a2")
    assert test.flying[-1] == ("unpack", ["a2"])


def test_a_gate_may_be_polled_while_a_batch_ends() -> None:
    """SGLang's scheduler may poll a gate while the channel thread removes a ticket from it."""
    gate, other, forgotten = Gate(), Batch("pack", []), []

    class Asked(Batch):
        def over(self) -> bool:
            if not forgotten:
                forgotten.append(threading.Thread(target=gate.ended, args=(other,)))
                forgotten[0].start()
                forgotten[0].join(0.05)
            return True

    other.end.set()
    for ticket in (Asked("pack", []), other):
        gate.tickets[ticket] = None
    assert gate.try_close()
    forgotten[0].join(5)
    assert len(gate.tickets) == 1


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_gate_waits_for_each_of_its_batches(owners: list[str], order: Any) -> None:
    """A gate waits for exactly those of its batches that are still in flight.

    Batches end in any order. The channel thread may or may not have removed those that ended.
    """
    gates, left = {name: Gate() for name in "ab"}, list[tuple[str, Batch]]()
    for owner in owners:
        left.append((owner, batch := Batch("pack", [owner])))
        gates[owner].tickets[batch] = None
    order.shuffle(left)
    while left:
        flying = {owner for owner, _ in left}
        assert {name for name, gate in gates.items() if not gate.try_close()} == flying
        owner, batch = left.pop()
        batch.end.set()
        if order.random() < 0.5:
            gates[owner].ended(batch)
    assert all(gate.try_close() for gate in gates.values())


@pytest.mark.parametrize(("looks", "is_slow"), [(0, False), (1, False), (2, False), (3, True)])
def test_a_closing_gate_polls_often_and_logs_a_long_wait(
    looks: int, is_slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A closing gate polls at least once per millisecond, and logs a wait longer than SLOW_S.

    SGLang's scheduler waits meanwhile. On the test's clock, each poll takes one second.
    """
    gate, slept = Gate(), list[float]()

    class Ends(Batch):
        def over(self) -> bool:
            return len(slept) >= looks

    gate.tickets[Ends("pack", [])] = None
    clock = SimpleNamespace(monotonic=lambda: 100 + len(slept), sleep=slept.append)
    monkeypatch.setattr(gate_module, "time", clock)
    monkeypatch.setattr(gate_module, "SLOW_S", 2)
    gate.close()
    assert len(slept) == looks
    assert all(0 < seconds < 1e-3 for seconds in slept)
    assert ["waited 3.0 s" in line for line in caplog.messages] == [True] * is_slow


class Asked:
    """A CUDA event that counts its queries. `answer`: the value that a query returns or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    def query(self) -> bool:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_held_copies_keep_their_requests_order() -> None:
    """Copies of a request start in order, and do not wait for those of other requests."""
    held, early, late = HeldBack[str](), Asked(True), Asked(False)
    first, second, third = Gate(), Gate(), Gate()
    pages = {name: Pages((), 1, events) for name, events in (("a", [early, late]), ("b", []))}
    held += [
        (first, pages["a"], "a1"),
        (second, Pages((), 2, [early]), "c"),
        (first, pages["b"], "a2"),
    ]
    held.append((third, Pages((), 1, [late]), "d"))
    before = time.monotonic()
    assert held.release() == [("c", None)]
    assert (early.asked, late.asked) == (2, 2), "a2 waits for a1, although its pages have no event"
    late.answer = RuntimeError("unknown")
    first.close()
    assert held.release() == [("a1", None), ("a2", None), ("d", late.answer)]
    assert not held
    assert pages["a"].written > before
    late.answer = True
    assert pages["a"].are_written()
    assert pages["a"].are_written()
    assert (early.asked, late.asked) == (2, 4), "an event that has ended is queried again"


@pytest.mark.parametrize("kind", ["pack", "unpack", "clear"])
@pytest.mark.parametrize(
    ("tokens", "heads", "is_small"),
    [(5, range(4), True), (6, range(4), False), (20, range(1, 2), True), (21, range(1, 2), False),
     (10, range(2, 4), True), (11, range(2), False)],
)  # fmt: skip
def test_host_copies_of_up_to_at_once_bytes_need_no_thread(
    tokens: int, heads: range, is_small: bool, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of all heads that are copied decide. A larger copy would delay the channel."""
    entries = [torch.zeros((32, 4, width), dtype=torch.uint8) for width in (8, 24)]
    rows, threads, woken = DraftRows(entries, range(4)), list[int](), threading.Event()
    staging: Any = SimpleNamespace(slot=lambda _: None)
    monkeypatch.setattr(copier, "AT_ONCE", 5 * 4 * rows.bytes_per_head)

    def copied(*_: Any) -> SlotCheck:
        threads.append(threading.get_ident())
        return SlotCheck.OK

    monkeypatch.setattr(rows, kind, copied)
    store: Any = SimpleNamespace(rows=rows, staging=staging)
    host = copier.HostCopier(store, lambda *_: None, "copies", woken.set)
    pages = Pages([0], 32)
    host.start([Copy(kind, "job", Gate(), pages, 0, tokens, heads)])
    assert is_small or woken.wait(10)
    assert [one == threading.get_ident() for one in threads] == [is_small]
    assert list(host.ended()) == [(["job"], SlotCheck.OK)]
    host.stop()
