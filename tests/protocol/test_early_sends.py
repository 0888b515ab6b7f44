"""SGLang's early chunks are sent only after their KV is written. If neither SGLang nor the plugin
waits for the forward that writes it, the plugin switches early sends off."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rig.ring.logs import keep_lines
from rig.ring.model import Case, Request
from rig.ring.rank import Rank, send
from rig.ring.run import right, run
from rig.ring.special import Special

from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.guards import early_sends
from sglang_mixkv.guards.early_sends import (
    EARLY_SENDS,
    EarlySends,
    switch_off_early_sends,
)

# ---------------------------------------------------------------- in the ring


class HeldBack:
    """A stand-in for the torch.cuda.Event of a forward, which ends and has written its rows when
    `is_over` returns True."""

    def __init__(self, is_over: Callable[[], bool], write: Callable[[], None]) -> None:
        self._is_over, self._write = is_over, write

    def query(self) -> bool:
        if is_over := self._is_over():
            self._write()
        return is_over


def first_held_back(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """Write the first chunk of request 0 only after request 1 has ended. Request 1 is sent after
    all of request 0, through the same queue. Until then, the rows of target and drafter are
    wrong."""
    number = sender.ring_number
    if number == 1 and 0 in rank.open and rank.open[0].chunks:
        rank.open[1].chunks.insert(0, chunk)
        return
    if number == 0 and not sender.curr_idx:
        entries = [entry for name in ("target", "draft") for entry in rank.pools[name]]
        truth = [entry[chunk].copy() for entry in entries]
        for entry in entries:
            entry[chunk] ^= 0xFF

        def write() -> None:
            for entry, rows in zip(entries, truth, strict=True):
                entry[chunk] = rows

        sender._early_send_wait_event = HeldBack(
            lambda: any(one.number == 1 for one in rank.report.ended), write
        )
    send(rank, sender, chunk, state)


REQUESTS = (Request(23, chunk_pages=2), Request(8))


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["P > D", "P < D"])
def test_over_nixl_an_early_chunk_waits_and_others_do_not(tp: tuple[int, int]) -> None:
    right(Case(*tp, backend="nixl", requests=REQUESTS, special=Special(send=first_held_back)))


def test_stocks_early_send_over_nixl_does_not_wait() -> None:
    """The KV of target and drafter is wrong, without an error. If this test fails, SGLang has fixed
    the fault, and the guard can be removed."""
    special = Special(send=first_held_back)
    case = Case(1, 1, backend="nixl", requests=REQUESTS, special=special)
    outcome = run(replace(case, prefill_mixkv=False, decode_mixkv=False))
    assert outcome.statuses == {"success"}
    wrong = {line.partition(" entry")[0].removeprefix("decode rank 0 ") for line in outcome.wrong}
    assert wrong == {"target", "draft"}


# ---------------------------------------------------------------- the queue


class Event:
    """An event that is done after `asks` queries; a negative number makes each query raise."""

    def __init__(self, asks: int) -> None:
        self.left = asks

    def query(self) -> bool:
        if self.left < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.left -= self.left > 0
        return not self.left


NEVER = 10**9


def queue_of(*chunks: tuple[int, int, Event | None]) -> Any:
    """Make NIXL's queue with these chunks (room, number, event), added as SGLang adds them."""
    manager = EarlySends()
    manager.transfer_queues = [object()]
    (queue,) = manager.transfer_queues
    for room, number, event in chunks:
        manager.early = event
        queue.put(SimpleNamespace(room=room, number=number))
    manager.early = None
    return queue


def take(queue: Any, count: int) -> list[tuple[int, int]]:
    return [(one.room, one.number) for one in (queue.get() for _ in range(count))]


def test_a_chunk_waits_for_its_event_and_for_earlier_chunks() -> None:
    held, late = Event(NEVER), Event(100)
    queue = queue_of((1, 0, held), (1, 1, None), (2, 0, late), (2, 1, None), (3, 0, None))
    assert take(queue, 3) == [(3, 0), (2, 0), (2, 1)]
    assert held.left < NEVER - 50, "the event was not polled"
    held.left = 0
    assert take(queue, 2) == [(1, 0), (1, 1)]


def test_a_later_chunk_overtakes_one_that_waits() -> None:
    queue = queue_of((1, 0, Event(NEVER)))
    later = SimpleNamespace(room=2, number=0)
    threading.Timer(0.05, queue.put, [later]).start()
    assert take(queue, 1) == [(2, 0)]


def test_each_of_sglangs_workers_gets_only_its_own_chunks() -> None:
    """SGLang gives each room to one of several workers, each with its own queue."""
    manager = EarlySends()
    manager.transfer_queues = [object() for _ in range(3)]
    queues = manager.transfer_queues
    for room in (2, 0, 1, 2):
        queues[room].put(SimpleNamespace(room=room, number=len(queues)))
    assert [take(queues[room], count) for room, count in enumerate((1, 1, 2))] == [
        [(0, 3)], [(1, 3)], [(2, 3), (2, 3)],
    ]  # fmt: skip


def test_an_idle_worker_sleeps_until_a_chunk_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without chunks does not poll, since each poll takes the GIL."""
    looked, real = list[int](), early_sends.ChunkQueue._written
    monkeypatch.setattr(
        early_sends.ChunkQueue, "_written", lambda one: looked.append(1) or real(one)
    )
    queue = queue_of()
    threading.Timer(0.3, queue.put, [SimpleNamespace(room=2, number=0)]).start()
    assert take(queue, 1) == [(2, 0)]
    assert len(looked) == 2


def test_a_chunk_whose_event_cannot_be_queried_is_never_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The room's later chunks are not sent either, so that no request succeeds with KV that was not
    written. SGLang's worker continues with other rooms."""
    caplog.set_level("ERROR", "sglang")
    queue = queue_of((1, 0, Event(-1)), (1, 1, None), (2, 0, Event(100)), (3, 0, None))
    assert take(queue, 2) == [(3, 0), (2, 0)]
    assert [chunk.number for chunk, _ in queue._chunks] == [0, 1]
    assert [one.args for one in caplog.records] == [(1,)]


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_a_worker_spares_captures_before_it_queries_an_event(
    hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, a thread that queries an event breaks another thread's graph capture, unless it has
    called spare_captures before."""
    done = list[Any]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(early_sends, "spare_captures", lambda: done.append(threading.get_ident()))
    event = SimpleNamespace(query=lambda: done.append("asked") or True)
    queue = queue_of((1, 0, event), (2, 0, event))
    worker = threading.Thread(target=take, args=(queue, 2))
    worker.start()
    worker.join()
    assert done == [worker.ident][: hip is None] + ["asked"] * 2


# ---------------------------------------------------------------- switched off


@pytest.mark.parametrize(
    ("backend", "release", "off"),
    [("nixl", "0.5.23", True), ("nixl", "0.6.0", True), ("mooncake", "0.5.21.post1", True),
     ("mooncake", "0.5.22", False), ("mooncake", "0.10.0", False)],
)  # fmt: skip
def test_early_sends_are_off_if_nothing_waits_for_the_kv(
    backend: str, release: str, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin does not change a setting that the operator has made. A NIXL manager without
    `transfer_queues` belongs to an untested release, where the plugin's queue has no effect."""
    theirs: dict[str, Any] = {"transfer_queues": [object()]} if backend == "mooncake" else {}
    manager = SimpleNamespace(backend=backend, **theirs)
    for value in ("0", "1"):
        monkeypatch.setenv(EARLY_SENDS, value)
        assert not switch_off_early_sends(manager, release)
        assert os.environ[EARLY_SENDS] == value
    del os.environ[EARLY_SENDS]
    assert bool(switch_off_early_sends(manager, release)) == off
    assert os.environ.get(EARLY_SENDS) == ("0" if off else None)


def report_setting(rank: Rank) -> None:
    rank.report.reasons.append(f"{rank.side}: {os.environ.get(EARLY_SENDS)}")


SWITCHED_OFF = ["prefill 0: INFO sglang-mixkv", "prefill: 0"]


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_prefill_rank_switches_early_sends_off_and_logs_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = backend == "nixl" or sglang_version() != "0.5.21"
    expected = ["prefill: None"] if waits else SWITCHED_OFF
    monkeypatch.delenv(EARLY_SENDS, raising=False)
    faults = {(side, 0): report_setting for side in ("prefill", "decode")}
    special = Special(faults=faults, before={("prefill", 0): keep_lines(EARLY_SENDS)})
    outcome = run(Case(1, 1, backend=backend, requests=(Request(8),), special=special))
    assert outcome.wrong == []
    assert [line[:28] for line in outcome.prefill[0].reasons] == expected
    assert outcome.decode[0].reasons == ["decode: None"]
