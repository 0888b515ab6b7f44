"""What goes wrong on a prefill rank itself costs the request that it went wrong with, and no other.

Ten requests are in flight on one transfer thread. SGLang takes a code other than 0 for a decode
rank that is dead, and then fails every request to it.
"""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from protocol.model import Cache, Case, Request
from protocol.ring import Outcome, Rank, run

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
            if left and rank.manager.current.chunk.room == rank.rooms()[0]:
                raise left.pop()
            return real(*args, **kwargs)

        setattr(owner(rank), name, broken)

    return inject


def manager(rank: Rank) -> Any:
    return rank.manager


def rows(rank: Rank) -> Any:
    return rank.manager.rows


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
        raising(manager, "_prefill_unique_rank", KeyError("rank")), "KeyError('rank')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_it_fails_its_own_room_only(name: str) -> None:
    case, rank, inject, words = FAILURES[name]
    case = ten(case, {("prefill", rank): inject})
    only_the_first_failed(run(case), words)


def ten(case: Case, faults: dict[tuple[str, int], Callable[[Rank], None]]) -> Case:
    return replace(case, requests=TEN, extra={**case.extra, "faults": faults})


# ---------------------------------------------------------------- a client leaves


def held(write: int, begun: Any) -> Callable[[Rank], None]:
    """This write of the first request lasts until the scheduler has cleared its room."""

    def inject(rank: Rank) -> None:
        real, room, seen = rank.manager.engine.batch_transfer_sync, rank.rooms()[0], []

        def slow(*args: Any) -> int:
            if rank.manager.current.chunk.room == room:
                seen.append(1)
                if len(seen) == write:
                    begun.set()
                    deadline = time.monotonic() + 5
                    while room in rank.manager.request_status and time.monotonic() < deadline:
                        time.sleep(0.001)
            return int(real(*args))

        rank.manager.engine.batch_transfer_sync = slow

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
