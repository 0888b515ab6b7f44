"""Pages of an aborted request are not used again while a write to them may be in flight.

SGLang's own deferred release runs here (rig/releases.py): it waits for the acknowledgement of
every prefill rank that was contacted. A draft-only sender is one of them, and still writes.
"""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from rig.model import Case, Request
from rig.rank import Rank
from rig.releases import Releases
from rig.ring import run
from rig.stand_ins import StandIn, decode_rank, in_own_process

from sglang_mixkv.engine.releases import here

pytestmark = pytest.mark.transports(every=2)

WRITES_S = 1.0


def slow_write(writing: Any, written: Any) -> Any:
    """This prefill rank's first write takes WRITES_S."""

    def inject(rank: Rank) -> None:
        def slowing(real: Callable[..., int]) -> Callable[..., int]:
            def slow(*args: Any) -> int:
                if not written.value:
                    writing.set()
                    time.sleep(WRITES_S)
                    written.value = time.monotonic()
                return int(real(*args))

            return slow

        rank.on_transfer(slowing)

    return inject


def abort_while_it_writes(writing: Any, freed: Any) -> Any:
    """This decode rank aborts its first request, and notes when its pages are free."""

    def inject(rank: Rank) -> None:
        cls = rank.kv_class["receiver"]
        real, hold, aborted = cls.send_metadata, rank.releases.hold, []

        def aborting(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            if not aborted:
                aborted.append(1)
                threading.Thread(target=lambda: writing.wait(60) and self.abort()).start()

        def noting(receiver: Any) -> None:
            hold(receiver, lambda: setattr(freed, "value", time.monotonic()))

        cls.send_metadata, rank.releases.hold = aborting, noting

    return inject


def written_and_freed(sender: int) -> tuple[float, float]:
    writing, written, freed = mp.Event(), mp.Value("d", 0.0), mp.Value("d", 0.0)
    faults = {
        ("prefill", sender): slow_write(writing, written),
        ("decode", 0): abort_while_it_writes(writing, freed),
    }
    outcome = run(
        Case(2, 1, requests=(Request(12), Request(9)), rounds=((0,), (1,)),
             extra={"faults": faults, "config": {"draft_transfer": "direct"}})
    )  # fmt: skip
    assert outcome.wrong == []
    assert outcome.decode[0].status == ["failed", "success"]
    assert written.value > 0
    assert freed.value > 0
    return written.value, freed.value


@pytest.mark.parametrize("sender", [0, 1], ids=["target's", "draft-only"])
def test_pages_are_free_after_the_last_write(sender: int) -> None:
    written, freed = written_and_freed(sender)
    assert freed > written


def test_it_fails_when_draft_only_senders_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Releases.hold

    def hold(self: Releases, receiver: Any, *args: Any) -> None:
        real(self, receiver, *args)
        request, start, deadline, index, _ = self.queue._deferred_releases.pop()
        self.queue._deferred_releases.append((request, start, deadline, index, 1))

    monkeypatch.setattr(Releases, "hold", hold)
    written, freed = written_and_freed(1)
    assert freed < written


@pytest.mark.mooncake_only
@pytest.mark.skipif("OwnAnswers" not in here().shims, reason="this SGLang keeps none")
@in_own_process
def test_a_request_counts_its_own_answers() -> None:
    """0.5.22 may keep one that came while the last request of that number was cleared."""
    server = StandIn(decode_rank(), fits=True, by_room=True)
    manager = server.rank.manager
    manager.prefill_response_tracker[7].add(1)
    first = server.request(7)
    assert 7 not in manager.prefill_response_tracker
    manager.prefill_response_tracker[7].add(0)
    server.request(7)  # the number is in use: whose answers these are is not known
    assert manager.prefill_response_tracker[7] == {0}
    first.clear()


def test_a_chunk_is_its_own_requests_when_another_has_the_number() -> None:
    """SGLang looks for its number when a thread takes it, and would send it to another's pages."""
    from sglang.srt.disaggregation.common.utils import FastQueue

    from sglang_mixkv.engine.transfers import Queued, SchedulerQueue, WorkerQueue
    from sglang_mixkv.prefill.rooms import Rooms
    from sglang_mixkv.prefill.worker import Worker

    rooms, raw = Rooms(), FastQueue()
    worker = Worker(rooms, mock.Mock(), mock.Mock())
    scheduler = SchedulerQueue(raw, lambda chunk: Queued(chunk, rooms.open_room(7), chunk.event))
    chunks = [mock.Mock(room=7, index_slice=slice(0, 2)) for _ in range(2)]
    first = rooms.open(7, 0.0)
    scheduler.put(chunks[0])
    rooms.close(first, 0.0)
    second = rooms.open(7, 0.0)
    assert not second.reason
    scheduler.put(chunks[1])
    scheduler.put(None)
    taken = WorkerQueue(raw, worker)
    assert taken.get() is chunks[1]
    assert worker.task is not None
    assert (worker.task.room, worker.task.written) == (second, chunks[1].event)
    rooms.close(second, 0.0)
    assert rooms.is_taken(7), "what the thread says about 7 would be about a third"
    assert (taken.get(), worker.task) == (None, None)
    assert not rooms.is_taken(7)


def test_a_room_that_ends_while_it_fails_is_told_all_the_same() -> None:
    """The scheduler sees the failure, and may clear the sender before decode ranks are told."""
    from sglang_mixkv.engine.prefill_tables import PrefillTables

    manager = mock.Mock(failure_records={})
    members = [("10.0.0.1", 9000)]
    manager._room_notify_targets.side_effect = lambda room: list(members)
    manager.conclude_failure.side_effect = lambda **_: (members.clear(), "failed")
    tables = PrefillTables(manager)
    tables._notices = mock.Mock()
    tables.fail(7, "why")
    assert [call.args[:2] for call in tables._notices.send.mock_calls] == [("10.0.0.1", 9000)]
