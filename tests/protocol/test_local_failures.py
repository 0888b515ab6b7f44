"""What goes wrong on a prefill rank itself costs the request that it went wrong with, and no other.

Ten requests are in flight on one transfer thread. SGLang takes a code other than 0 for a decode
rank that is dead, and then fails every request to it.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from rig.faults import failing_transport, prefill_aborts
from rig.model import Cache, Case, Request
from rig.rank import Rank
from rig.ring import Outcome, run

TEN = tuple(Request(9 + i) for i in range(10))
GQA = Cache("mha", layers=2, heads=4)
PACKED = {"draft_transfer": "packed"}


def only_the_first_failed(outcome: Outcome, words: str = "") -> None:
    """On every decode rank; nobody was declared dead, and the others' bytes are right."""
    assert outcome.wrong == []
    for rank in outcome.decode:
        assert rank.status == ["failed", *["success"] * 9], outcome.reasons
    assert words in outcome.reasons
    assert "Decode instance could be dead" not in outcome.reasons


# ---------------------------------------------------------------- something raises


def raising(owner: Callable[[Rank], Any], name: str, error: Exception) -> Callable[[Rank], None]:
    """This method raises, once, in the transfer thread that works on the first request."""

    def inject(rank: Rank) -> None:
        real, left = getattr(owner(rank), name), [error]

        def broken(*args: Any, **kwargs: Any) -> Any:
            if left and rank.manager._worker.task.room.number == rank.rooms()[0]:
                raise left.pop()
            return real(*args, **kwargs)

        setattr(owner(rank), name, broken)

    return inject


def manager(rank: Rank) -> Any:
    return rank.manager


def side(rank: Rank) -> Any:
    return rank.manager.prefill


def rows(rank: Rank) -> Any:
    return rank.plugin.rows


NO_MEMORY = raising(rows, "copy", MemoryError("CUDA out of memory"))
FAILURES: dict[str, tuple[Case, int, Callable[[Rank], None], str]] = {
    "a copy, P1-D2": (Case(1, 2, extra={"config": PACKED}), 0, NO_MEMORY, "out of memory"),
    "a copy, P2-D1": (Case(2, 1, extra={"config": PACKED}), 1, NO_MEMORY, "out of memory"),
    "a kernel that does not compile": (
        Case(1, 2, extra={"config": PACKED}), 0,
        raising(rows, "copy", RuntimeError("PTXAS error")), "PTXAS error",
    ),
    "SGLang's own, no drafter": (
        Case(2, 1, target=GQA, draft=None), 0,
        raising(manager, "get_mha_kv_ptrs_with_pp", KeyError("layer")), "KeyError('layer')",
    ),
    "SGLang's own, state": (
        Case(2, 1, hybrid=True), 1,
        raising(manager, "_send_mamba_state_slice", RuntimeError("no dims")), "no dims",
    ),
    "checksums": (
        Case(1, 2, extra={"config": {"verify": "checksum"}}), 0,
        raising(side, "digest", KeyError("rank")), "KeyError('rank')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_it_fails_its_own_room_only(name: str) -> None:
    case, rank, inject, words = FAILURES[name]
    case = ten(case, {("prefill", rank): inject})
    only_the_first_failed(run(case), words)


def ten(case: Case, faults: dict[tuple[str, int], Callable[[Rank], None]]) -> Case:
    return replace(case, requests=TEN, extra={**case.extra, "faults": faults})


# ---------------------------------------------------------------- the scheduler does not wait


def tells_nobody(rank: Rank) -> None:
    """SGLang's sockets wait up to 30 s for a peer that does not read."""
    real = rank.manager.send_kv_status_message

    def telling(*, targets: list[tuple[str, int]], **kwargs: Any) -> None:
        if targets and threading.current_thread() is threading.main_thread():
            rank.report.wrong.append(f"prefill rank {rank.rank}: its scheduler tells {targets}")
        real(targets=targets, **kwargs)

    rank.manager.send_kv_status_message = telling


def too_long_a_prefix(rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
    if sender.bootstrap_room == rank.rooms()[0]:
        sender.init(-1)
        return
    sender.send(chunk, state)


def too_short_a_chunk(rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
    if sender.bootstrap_room == rank.rooms()[0]:
        sender.num_kv_indices -= 1
        chunk = chunk[:-1]
    sender.send(chunk, state)


FROM_THE_SCHEDULER = {
    "aborted by": partial(prefill_aborts, 0),
    "longer than the prompt": too_long_a_prefix,
    "refuses to send room": too_short_a_chunk,
}


@pytest.mark.parametrize("words", FROM_THE_SCHEDULER)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_the_scheduler_waits_for_no_socket(prefill_tp: int, decode_tp: int, words: str) -> None:
    """And the decode side hears it all the same, at once."""
    case = Case(prefill_tp, decode_tp, extra={"send": FROM_THE_SCHEDULER[words]})
    outcome = run(ten(case, {("prefill", r): tells_nobody for r in range(prefill_tp)}))
    only_the_first_failed(outcome, words)
    assert all(rank.seconds[0] < 20 for rank in outcome.decode), "not by SGLang's timeout"


def test_notices_to_a_peer_that_does_not_read_do_not_wait() -> None:
    """SGLang's socket would wait after a thousand of them."""
    from sglang_mixkv.engine.replies import Notices

    notices = Notices()
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    sending = threading.Thread(
        target=lambda: [notices.send("127.0.0.1", port, [b"x" * 1000]) for _ in range(3000)],
        daemon=True,
    )
    sending.start()
    sending.join(30)
    silent.close()
    assert not sending.is_alive()


# ---------------------------------------------------------------- a client leaves


def held(write: int, begun: Any) -> Callable[[Rank], None]:
    """This write of the first request lasts until the scheduler has cleared its room."""

    def inject(rank: Rank) -> None:
        room, seen = rank.rooms()[0], []

        def slow(real: Callable[..., int], *args: Any) -> int:
            if rank.manager._worker.task.room.number == room:
                seen.append(1)
                if len(seen) == write:
                    begun.set()
                    deadline = time.monotonic() + 5
                    while room in rank.manager.request_status and time.monotonic() < deadline:
                        time.sleep(0.001)
            return int(real(*args))

        rank.on_transfer(lambda real: partial(slow, real))

    return inject


def leaves(begun: Any) -> Callable[[Rank], None]:
    """This decode rank aborts its first request once that write has begun."""

    def inject(rank: Rank) -> None:
        cls = rank.kv_class["receiver"]
        real = cls.send_metadata

        def leave(receiver: Any) -> None:
            if begun.wait(10):
                receiver.abort()

        def sending(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            if self.bootstrap_room == rank.rooms()[0]:
                threading.Thread(target=leave, args=(self,), daemon=True).start()

        cls.send_metadata = sending

    return inject


@pytest.mark.parametrize("write", [1, 2, 3])
@pytest.mark.parametrize("window", [0, 6])
def test_a_client_that_leaves_costs_only_its_own_request(window: int, write: int) -> None:
    """In the write of the first chunk to one decode rank or the other, or of the second chunk."""
    begun = mp.get_context("fork").Event()
    requests = (Request(20, chunk_pages=3), *TEN[1:])
    faults = {("prefill", 0): held(write, begun), **{("decode", r): leaves(begun) for r in (0, 1)}}
    case = Case(1, 2, draft_window=window, requests=requests, extra={"faults": faults})
    only_the_first_failed(run(case), "Aborted by AbortReq")


# ---------------------------------------------------------------- a write fails


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "rank"), [(2, 1, 0), (2, 1, 1), (1, 2, 0)])
def test_a_failed_write_to_a_peer_that_answers_fails_its_own_room_only(
    prefill_tp: int, decode_tp: int, rank: int
) -> None:
    """SGLang takes such a peer back too, half a minute later, and fails all until then."""
    faults = {("prefill", rank): failing_transport(1)}
    outcome = run(ten(Case(prefill_tp, decode_tp), faults))
    only_the_first_failed(outcome, "the transport returned -1; the decode rank answers")


def test_failed_writes_in_a_row_that_cost_no_time_fail_their_own_rooms_only() -> None:
    """Of several requests at once, say, that were given pages which their peer has not
    registered."""
    outcome = run(ten(Case(2, 1), {("prefill", 1): failing_transport(5)}))
    assert outcome.wrong == []
    assert sorted(outcome.decode[0].status) == ["failed"] * 5 + ["success"] * 5
    assert "Decode instance could be dead" not in outcome.reasons


def slow_to_fail(rank: Rank) -> None:
    """Every write fails, and by this rank's clock each takes 12 s."""
    from sglang_mixkv.prefill import rank as module

    class Clock:
        perf_counter = staticmethod(time.perf_counter)
        ahead = 0.0

        def monotonic(self) -> float:
            return time.monotonic() + self.ahead

    clock = Clock()
    module.time = clock

    def failing(*_: Any) -> int:
        clock.ahead += 12
        return -1

    rank.on_transfer(lambda _: failing)


def test_a_peer_to_which_every_write_fails_is_taken_for_dead() -> None:
    """Once they have cost too much time: each holds up a thread as long as the transport waits."""
    outcome = run(ten(Case(2, 1), {("prefill", 1): slow_to_fail}))
    assert outcome.wrong == []
    assert outcome.decode[0].status == ["failed"] * 10
    assert outcome.reasons.count("the decode rank answers") == 2 * 2, "on both sides"
    assert "Decode instance could be dead" in outcome.reasons


def test_without_sglangs_own_probe_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off in 0.5.22, which never takes such a peer back."""
    monkeypatch.setenv("SGLANG_ENABLE_FAILED_SESSION_PROBE", "0")
    outcome = run(ten(Case(2, 1), {("prefill", 1): failing_transport(1)}))
    only_the_first_failed(outcome, "the transport returned -1; the decode rank answers")


# ---------------------------------------------------------------- a room is cleared


def cleared_while_read(rank: Rank) -> None:
    """The scheduler clears the first request's room while SGLang's control thread parses its
    metadata."""
    from sglang.srt.disaggregation.mooncake import conn

    real, left = conn.TransferInfo.from_zmq, [1]

    def parsing(message: list[bytes]) -> Any:
        said = real(message)
        if left and said.room == rank.rooms()[0]:
            left.pop()
            rank.manager.transfer_infos.pop(said.room)
            rank.plugin._sglang.fail(said.room, "the client left")
        return said

    conn.TransferInfo.from_zmq = parsing


def failed_before_it_is_read(rank: Rank) -> None:
    """The first request fails while the metadata of a decode rank is judged."""
    real = rank.plugin.rooms.join

    def joining(said: Any, *args: Any) -> None:
        if said.room == rank.rooms()[0]:
            rank.plugin._sglang.fail(said.room, "the client left")
        real(said, *args)

    rank.plugin.rooms.join = joining


@pytest.mark.parametrize(
    ("fault", "words"),
    [(cleared_while_read, "the client left"), (failed_before_it_is_read, "failed before")],
)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_a_room_that_ends_while_its_metadata_is_read_fails_on_both_sides(
    prefill_tp: int, decode_tp: int, fault: Callable[[Rank], None], words: str
) -> None:
    """At once, and no thread of SGLang's ends."""
    faults = {("prefill", rank): fault for rank in range(prefill_tp)}
    outcome = run(ten(Case(prefill_tp, decode_tp), faults))
    only_the_first_failed(outcome, words)
    assert all(rank.seconds[0] < 20 for rank in outcome.decode), "not by SGLang's timeout"
