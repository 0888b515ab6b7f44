"""On a decode rank, one request's trouble stays its own: refused servers, failed requests, aborts.

Counted are events (requests over HTTP and by whom, registrations, messages, ranges), not seconds.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rig import faults
from rig.model import Cache, Case, Request
from rig.rank import Rank
from rig.ring import Outcome, run
from rig.stand_ins import StandIn, decode_rank, in_own_process, wait_until

from sglang_mixkv.engine.releases import here

REFUSED = 1000


def right(outcome: Outcome) -> None:
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


# ---------------------------------------------------------------- refused servers


def refuse(server: StandIn, rooms: range) -> list[str]:
    """Requests that are refused, each ended as SGLang ends them. Their reasons."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    reasons = []
    for room in rooms:
        receiver = server.request(room)
        assert receiver.poll() == KVPoll.Failed
        try:
            receiver.failure_exception()
        except Exception as error:
            reasons.append(str(error))
    return reasons


@in_own_process
def test_a_thousand_refused_requests_cost_nobody_else() -> None:
    """The server is asked once a second, by no thread of SGLang's; nothing waits in SGLang's
    executor; one line is logged; and every room's end is told."""
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang_mixkv").addHandler(handler)
    rank = decode_rank()
    server = StandIn(rank, fits=False, by_room=True)
    refuse(server, range(1))
    first, threads, began = server.asked.copy(), threading.active_count(), time.monotonic()
    reasons = refuse(server, range(1, REFUSED))
    elapsed = time.monotonic() - began
    assert all("page size: prefill has" in reason for reason in reasons)
    asked = server.asked - first
    assert {path: n for (path, mine), n in asked.items() if mine} == {}
    assert asked["/mixkv", False] <= elapsed + 1
    executor = rank.manager._prefill_recompute_executor
    assert executor is None or executor._work_queue.qsize() == 0
    assert threading.active_count() <= threads + 1
    assert len(lines) == 1
    wait_until(lambda: server.aborted(0) >= set(range(REFUSED)))
    assert server.asked["/route", False] <= 2 * (1 + server.tp)
    assert rank.manager.check_integrity() == []


@pytest.mark.parametrize("by_room", [True, False])
@in_own_process
def test_the_dp_rank_that_has_the_room_is_told(by_room: bool) -> None:
    """SGLang resolves no DP rank of a server whose sizes it was not told."""
    server = StandIn(decode_rank(), dp=4, fits=False, by_room=by_room)
    rooms = range(40)
    refuse(server, rooms)
    for dp in range(4):
        its = {room for room in rooms if not by_room or room % 4 == dp}
        wait_until(lambda dp=dp, its=its: server.aborted(dp) >= its)


@in_own_process
def test_an_answer_that_comes_at_once_does_not_stop_the_asking() -> None:
    """The other thread may have it before the scheduler goes on."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    server = StandIn(decode_rank(), fits=False, by_room=True)
    server.rank.manager._background.submit = lambda call, *args, **_: (call(*args), True)[1]
    rooms = iter(range(1, 10_000))
    for _ in range(2):
        assert server.request(next(rooms)).poll() == KVPoll.Failed
        time.sleep(1.1)
    server.announce(fits=True)
    wait_until(lambda: server.request(next(rooms)).poll() != KVPoll.Failed)


@pytest.mark.parametrize(
    ("reason", "again"),
    [("", True), ("[MIXKV-REG-02] it never arrived", True), ("Aborted by AbortReq.", False)],
)
def test_a_failure_without_a_reason_of_its_own_has_the_rank_register_again(
    reason: str, again: bool
) -> None:
    """Another rank of this server knew first; this one's own verdict may come too late."""

    @in_own_process
    def concluded() -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        server = StandIn(decode_rank(), fits=True, by_room=True)
        receiver, manager = server.request(1), server.rank.manager
        wait_until(lambda: len(server.heard[0]) == 2, 10)  # one registration with each prefill rank
        if reason:
            manager.record_failure(1, reason)
        receiver.conclude_state = KVPoll.Failed
        receiver.clear()
        server.request(2)
        wait_until(lambda: len(server.heard[0]) == 4 or not again, 10)
        time.sleep(0.3)
        assert len(server.heard[0]) == (4 if again else 2)

    concluded()


@in_own_process
def test_a_prefill_rank_without_a_route_fails_the_request_alone() -> None:
    """SGLang calls init in its scheduler's loop, which an exception would end."""
    from dataclasses import replace

    from sglang.srt.disaggregation.base.conn import KVPoll

    server = StandIn(decode_rank(), fits=True, by_room=True)
    server.resolve()
    sources = server.rank.plugin.sources
    sources.put(replace(sources.get(server.address), routes=()))
    receiver = server.request(1)
    assert receiver.poll() == KVPoll.Failed
    assert "MIXKV-PAIR-05" in server.rank.manager.failure_records[1]


@in_own_process
def test_what_nobody_expected_fails_the_request_alone() -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    server = StandIn(decode_rank(), fits=True, by_room=True)
    server.resolve()
    with mock.patch.object(server.rank.plugin, "begin", side_effect=OSError("unheard of")):
        receiver = server.request(1)
    assert receiver.poll() == KVPoll.Failed
    reason = server.rank.manager.failure_records[1]
    assert "[MIXKV-SELF-01]" in reason
    assert "unheard of" in reason
    assert server.request(2).poll() == KVPoll.WaitingForInput


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 503 busy\r\ncontent-length: 5\r\n\r\nlater", "answers 503: later"),
        (b"", "no answer"),
    ],
    ids=["an error", "nothing"],
)
def test_a_server_that_cannot_be_asked_is_named(
    answer: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang asks again, and would say no more than that it got nothing."""
    from sglang_mixkv.engine import handshake

    def serve() -> None:
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert handshake.fetch(address) is None
        thread.join()
    assert f"http://{address}/mixkv" in caplog.text
    assert words in caplog.text
    assert "MIXKV-MSG-02" in caplog.text


@in_own_process
def test_a_refused_server_that_was_restarted_is_used() -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    rank = decode_rank()
    server = StandIn(rank, fits=False, by_room=True)
    refuse(server, range(3))
    server.announce(fits=True)
    wait_until(lambda: server.request(100 + len(server.heard[0])).poll() != KVPoll.Failed)
    mine = {path: n for (path, mine), n in server.asked.items() if mine and path == "/mixkv"}
    assert mine == {"/mixkv": 1}, "asked in the scheduler's loop after it was refused"
    server.announce(fits=False)
    assert server.request(99).poll() == KVPoll.WaitingForInput, "resolved servers stay"


@pytest.mark.parametrize(
    ("now", "first", "next_one"),
    [({}, "", ""), ({"steps": 99}, "another in its place", ""),
     ({"page_size": 999}, "page size", "page size")],
    ids=["the same", "another that fits", "another that does not"],
)  # fmt: skip
def test_a_server_in_anothers_place_is_resolved_anew(
    now: dict[str, int], first: str, next_one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang knows of a restart only if its heartbeat failed meanwhile. It asks for addresses
    again all the same, here of another DP rank: those of the new server."""
    from sglang_mixkv.decode import sources

    monkeypatch.setattr(sources, "CURRENT_S", 0.0)

    @in_own_process
    def body() -> None:
        rank = decode_rank()
        server = StandIn(rank, dp=2, by_room=True, fits=True)
        assert failure_of(rank, server.request(2)) == ""
        server.announce(**now)
        assert fails_with(first, failure_of(rank, server.request(3)))
        if not first:
            wait_until(lambda: server.heard[1])
        assert all(message[0] == b"ABORT" for message in server.heard[1]) == bool(first)
        assert fails_with(next_one, failure_of(rank, server.request(5)))

    body()


def fails_with(words: str, failure: str) -> bool:
    """Whether a request failed with these words; without words, whether it did not fail."""
    return words in failure if words else not failure


def failure_of(rank: Rank, receiver: Any) -> str:
    """Why the request failed; "" if it waits for its pages."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    failed = receiver.poll() == KVPoll.Failed
    return rank.manager.failure_records[receiver.bootstrap_room] if failed else ""


@in_own_process
def test_a_server_that_stays_away_is_asked_once_a_second() -> None:
    """It was refused; now nothing listens there: it is neither refused nor known."""
    rank = decode_rank()
    server = StandIn(rank, fits=False, by_room=True)
    refuse(server, range(1))
    server.bootstrap.close()
    before, began = server.asked["/mixkv", False], time.monotonic()
    time.sleep(1.1)
    while time.monotonic() - began < 3:
        assert not rank.manager.try_ensure_parallel_info(server.address)
        time.sleep(0.01)
    assert server.asked["/mixkv", False] - before <= 3
    assert server.asked["/mixkv", True] == 1


# ---------------------------------------------------------------- failed requests


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, count: Any) -> None:
    """Count a method's calls in all ranks of the ring; `count` takes the arguments."""
    real, calls = getattr(owner, name), mp.Value("i", 0)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with calls.get_lock():
            calls.value += count(*args)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    count.calls = calls


def of_a_rank(request: Any) -> int:
    """Whether a GET of the bootstrap server asks for one rank's address."""
    return int(request.query.get("prefill_dp_rank") != "-1")


def any_call(*_: Any) -> int:
    return 1


def abort_every_other(rank: Rank) -> None:
    cls = rank.kv_class["receiver"]
    real = cls.send_metadata

    def aborting(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.bootstrap_room % 2 == 0:
            self.abort()

    cls.send_metadata = aborting


def fail_every_other(rank: Rank) -> None:
    """The transport fails the first write of every second request."""
    failed = set()

    def broken(real: Callable[..., int], *args: Any) -> int:
        room = rank.manager._worker.task.room.number
        if room % 2 or room in failed:
            return int(real(*args))
        failed.add(room)
        return -1

    rank.on_transfer(lambda real: partial(broken, real))


def give_every_other_up(rank: Rank) -> None:
    """The prefill's scheduler drops every second request, as when its client leaves."""
    cls = rank.kv_class["sender"]
    real = cls.send

    def aborting(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.bootstrap_room % 2 == 0:
            self.abort()
        else:
            real(self, *args, **kwargs)

    cls.send = aborting


@pytest.mark.parametrize(
    ("fault", "registrations"),
    [
        (("decode", 0, abort_every_other), 4),
        (("prefill", 3, give_every_other_up), 4),
        (("prefill", 3, fail_every_other), 4 + 4 * 4),
    ],
    ids=["aborted", "given up by prefill", "failed writes"],
)
def test_a_failed_request_costs_the_next_no_http(
    monkeypatch: pytest.MonkeyPatch, fault: Any, registrations: int
) -> None:
    """P4 -> D1: one address and one registration per prefill rank; a registration again only
    where it ends the blacklisting of this rank's session."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    count_calls(monkeypatch, CommonKVBootstrapServer, "_handle_route_get", of_a_rank)
    count_calls(monkeypatch, MooncakeKVManager, "_publish_peer_registration", any_call)
    side, number, inject = fault
    outcome = run(
        Case(4, 1, requests=(Request(12),) * 8, rounds=tuple((n,) for n in range(8)),
             extra={"faults": {(side, number): inject}, "pause": 0.1})
    )  # fmt: skip
    assert outcome.wrong == []
    assert outcome.decode[0].status == ["failed", "success"] * 4
    assert of_a_rank.calls.value == 4
    assert any_call.calls.value == registrations


# ---------------------------------------------------------------- the staging buffer


STAGED = Cache("mha", heads=2, k_bytes=256, v_bytes=256)  # 1 KiB per token on a decode rank


def abort_all_but_the_last(rank: Rank) -> None:
    faults.abort_after(0.002, count=len(rank.case.requests) - 1)(rank)


def test_regions_of_aborted_requests_are_free_when_they_are_drained() -> None:
    """16 requests that take a sixth of the buffer each, one after the other; 15 are aborted."""
    outcome = run(
        Case(2, 1, draft=STAGED, requests=(Request(170),) * 16,
             rounds=tuple((n,) for n in range(16)),
             extra={"config": {"draft_transfer": "packed", "staging_mb": 1}, "pause": 0.05,
                    "faults": {("decode", 0): abort_all_but_the_last}})
    )  # fmt: skip
    assert outcome.wrong == []
    assert outcome.decode[0].status[-1] == "success"
    assert "failed" in outcome.decode[0].status
    assert outcome.total("staging_full") == 0
    assert outcome.total("packed_bytes") > 0


@pytest.mark.parametrize(("timeout", "seconds"), [("45", 90.0), ("20", 60.0)])
def test_without_acknowledgements_a_region_waits(
    monkeypatch: pytest.MonkeyPatch, timeout: str, seconds: float
) -> None:
    """Twice as long as SGLang holds the request's pages, or a minute if that is less."""
    from sglang_mixkv.decode.regions import RegionAllocator

    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", timeout)
    real, held = RegionAllocator.retire, mp.Value("d", 0.0)

    def retire(self: Any, start: int, until: float) -> None:
        held.value = until - time.monotonic()
        real(self, start, until)

    monkeypatch.setattr(RegionAllocator, "retire", retire)
    extra = {
        "config": {"draft_transfer": "packed"}, "faults": {("decode", 0): faults.abort_after(0.0)},
        "without_releases": True,
    }  # fmt: skip
    run(Case(2, 1, draft=STAGED, requests=(Request(170),), extra=extra))
    assert held.value == pytest.approx(seconds, abs=2)


def take_it_later(rank: Rank) -> None:
    """There is no memory for the buffer until the second request comes."""
    engine, cls = rank.manager.engine, rank.kv_class["receiver"]
    register, init, seen = engine.batch_register, cls.init, []
    engine.batch_register = lambda *_: -1

    def taking(self: Any, *args: Any) -> None:
        if seen:
            engine.batch_register = register
            rank.plugin.landing._next_try = 1.0  # a minute has passed
        seen.append(1)
        init(self, *args)

    cls.init = taking


def test_a_buffer_that_comes_later_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill ranks that were registered with without one are registered with again."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    count_calls(monkeypatch, MooncakeKVManager, "_publish_peer_registration", any_call)
    outcome = run(
        Case(2, 1, draft=STAGED, requests=(Request(170),) * 3, rounds=((0,), (1,), (2,)),
             extra={"config": {"draft_transfer": "packed"},
                    "faults": {("decode", 0): take_it_later}})
    )  # fmt: skip
    right(outcome)
    assert any_call.calls.value == 2 * 2
    assert outcome.total("packed_bytes") > 0


# ---------------------------------------------------------------- pages of one token


@pytest.mark.parametrize("buffer", [True, False], ids=["region", "no region"])
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (4, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("target", [Cache("mla", layers=2), Cache("mha", layers=1, heads=4)])
def test_pages_of_one_token_take_few_ranges(
    target: Cache, sizes: tuple[int, int], buffer: bool
) -> None:
    """A range per chunk, entry and slice, as pages are neighbours; not one per token."""
    requests = (Request(400, chunk_pages=150), Request(90, prefix_pages=7))
    no_buffer = {("decode", rank): faults.no_staging_memory for rank in range(sizes[1])}
    case = Case(
        *sizes, target=target, draft=Cache("mha", layers=2, heads=4), page_size=1,
        requests=requests, shuffled=False, extra={"faults": {} if buffer else no_buffer},
    )  # fmt: skip
    outcome = run(case)
    right(outcome)
    chunks, entries, slices = 3 + 1, 2 + 4, max(*sizes)
    assert outcome.total("descriptors") <= chunks * entries * slices


def test_scattered_pages_of_one_token_go_through_a_region() -> None:
    case = Case(2, 1, draft=STAGED, page_size=1, requests=(Request(400),))
    outcome = run(case)
    right(outcome)
    assert outcome.total("descriptors") <= 400 * case.target.layers + 2 * 2


def test_windows_and_extents() -> None:
    """The drafter's window begins inside of a run of pages, and of a chunk."""
    right(run(
        Case(2, 1, target=Cache("mha", layers=1, heads=4), page_size=2, draft_window=37,
             requests=(Request(300, chunk_pages=40), Request(61)), shuffled=False,
             extra={"faults": {("decode", 0): faults.no_staging_memory}})
    ))  # fmt: skip


# ---------------------------------------------------------------- the scheduler's calls


@in_own_process
def test_poll_costs_what_stock_s_costs() -> None:
    """In Python calls: two more than stock, as the manager's check_status is ours."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVReceiver

    rank = decode_rank()
    receiver = StandIn(rank, fits=True, by_room=True).request(7)
    receiver.send_metadata(np.arange(5, dtype=np.int32), 0)
    ours = calls_of(receiver.poll)
    cls = type(rank.manager)
    cls.check_status = MooncakeKVManager.check_status
    assert ours - calls_of(lambda: MooncakeKVReceiver.poll(receiver)) <= 1


def calls_of(function: Any) -> int:
    """Python functions that are entered."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@in_own_process
def test_what_a_server_is_taken_for_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes and slices follow from the two servers, not from the request."""
    from sglang_mixkv.decode import source

    made = []
    real = source.routes
    monkeypatch.setattr(source, "routes", lambda *args: made.append(1) or real(*args))
    server = StandIn(decode_rank(), tp=4, fits=True, by_room=True)
    for room in range(20):
        server.request(room).send_metadata(np.arange(50, dtype=np.int32), 0)
    assert len(made) == 1


@pytest.mark.parametrize("held", ["prealloc queue", "transfer queue", "deferred release", ""])
def test_memory_is_released_only_when_no_receiver_is_left(
    monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """release_memory_occupation empties SGLang's queues without clearing receivers: it is
    refused while there are any, so that nothing of ours is left behind."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components import weight_updater

    if held == "deferred release" and here().version == "0.5.22":
        pytest.skip("SGLang 0.5.22 does not wait for these (docs/operate.md)")
    prealloc = mock.Mock(queue=["one"] * (held == "prealloc queue"), retracted_queue=[])
    transfer = mock.Mock(queue=["one"] * (held == "transfer queue"))
    transfer.has_pending_deferred_releases.return_value = held == "deferred release"
    scheduler = mock.Mock(
        chunked_req=None, last_batch=None, enable_overlap=False, waiting_queue=[],
        enable_hisparse=False, enable_hierarchical_cache=False, enable_lmcache=False,
        running_batch=mock.Mock(**{"is_empty.return_value": True}), _engine_paused=True,
        decode_offload_manager=None, disaggregation_mode=DisaggregationMode.DECODE,
        disagg_decode_prealloc_queue=prealloc, disagg_decode_transfer_queue=transfer,
    )  # fmt: skip
    scheduler.dllm_manager.any_staging_reqs.return_value = False
    scheduler._pp_microbatches_drained.return_value = True
    scheduler.grammar_manager.grammar_queue = []
    updater = mock.Mock(scheduler=scheduler, offload_tags=set())
    updater.is_fully_idle = lambda **options: Scheduler.is_fully_idle(scheduler, **options)
    monkeypatch.setattr(weight_updater.torch, "get_device_module", mock.Mock())
    release = weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation
    refused = pytest.raises(AssertionError, match="only when server is idle")
    with refused if held else contextlib.nullcontext():
        release(updater, mock.Mock(tags=["kv_cache"]))
    for queue in (prealloc, transfer):
        assert queue.release_memory_occupation.called is not bool(held)
