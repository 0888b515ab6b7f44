"""A sender's engine over TCP, within the limits of Mooncake's TCP transport.

The transport fails above some 2,048 ranges in flight an engine and peer, and after such an
overflow the engine can be stuck towards that peer for good: each call returns -1 after a
second, while the peer still answers a probe. So all threads together have at most
IN_FLIGHT ranges in flight, and an engine whose write failed although the peer answers is
replaced by a new one, with the same memory registered. A peer does not notice: the engine's
own session is never told to it.

Writes that go on by themselves (`start`) have a share of their own: no call waits for room that
is only given back by a thread which itself waits.

The failed call is not repeated: bytes of it may still arrive, and the request that it belongs
to fails. The old engine is kept, since ending it takes a second in which Python stands still.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_mixkv.transport.base import MAX_DESCRIPTORS, STARTED

logger = logging.getLogger(__name__)

MOST_ENGINES = 8
POLL_S = 5e-5
GIVE_UP_S = 30.0  # after which Mooncake gives a call up that waits, unless told else


@dataclass(frozen=True)
class Started:
    """Writes that go on by themselves: Mooncake's numbers of them, one a range, 0 of one that it
    turned down, the engine that does them, and when they are given up (time.monotonic)."""

    engine: Any
    session: str
    numbers: list[int]
    until: float


class BoundedEngine:
    """Stands in for SGLang's MooncakeTransferEngine; what is not here is the engine's own.

    `make`: a new engine like `engine`. Only transfer threads write, so only they wait.
    """

    def __init__(self, engine: Any, make: Callable[[], Any], limit: int = MAX_DESCRIPTORS) -> None:
        self._engine, self._make, self._limit = engine, make, limit
        self._memory: dict[int, int] = {}  # registered: address -> length
        self._retired: list[Any] = []
        self._lock = threading.Lock()  # of the engine in use and its memory
        self._turn = threading.Lock()
        self._room = threading.Condition()
        self._in_flight = 0
        self._started = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        with self._lock:
            code: int = self._engine.batch_register(ptrs, lengths)
            if code == 0:
                self._memory.update(zip(ptrs, lengths, strict=True))
            return code

    def batch_deregister(self, ptrs: list[int]) -> int:
        with self._lock:
            for ptr in ptrs:
                self._memory.pop(ptr, None)
            code: int = self._engine.batch_deregister(ptrs)
            return code

    def batch_transfer_sync(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int:  # fmt: skip
        """As the engine's, in calls of at most the limit. The first non-zero code ends it."""
        for start in range(0, len(lengths), self._limit):
            part = slice(start, start + self._limit)
            count = len(lengths[part])
            self._take(count)
            engine = self._engine
            try:
                code: int = engine.batch_transfer_sync(
                    session_id, buffers[part], peer_buffer_addresses[part], lengths[part]
                )
            finally:
                self._give_back(count)
            if code != 0:
                self._replace_if_stuck(engine, session_id)
                return code
        return 0

    def start(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> Started | None:  # fmt: skip
        """Begin these writes without waiting for their end; `finish` has to follow.

        None, with nothing begun, where too many are under way or Mooncake does not offer it.
        """
        engine, count = self._engine, len(lengths)
        mooncake = getattr(engine, "engine", None)
        if not hasattr(mooncake, "transfer_submit_write") or not self._start_more(count):
            return None
        ranges = zip(buffers, peer_buffer_addresses, lengths, strict=True)
        numbers = [_submit(mooncake, session_id, one) for one in ranges]
        return Started(engine, session_id, numbers, time.monotonic() + patience_s())

    def finish(self, started: Started) -> int:
        """Wait for these writes: 0, or -1 if any failed or was given up; that one may go on."""
        mooncake, until = started.engine.engine, started.until
        codes = [_outcome(mooncake, number, until) for number in started.numbers]
        with self._room:
            self._started -= len(codes)
        if not any(codes):
            return 0
        self._replace_if_stuck(started.engine, started.session)
        return -1

    def _start_more(self, count: int) -> bool:
        with self._room:
            fits = self._started + count <= STARTED
            self._started += count if fits else 0
            return fits

    def _take(self, count: int) -> None:
        """Room for so many ranges, in the order of asking: a large call is not passed by."""
        with self._turn, self._room:
            while self._in_flight + count > self._limit:
                self._room.wait()
            self._in_flight += count

    def _give_back(self, count: int) -> None:
        with self._room:
            self._in_flight -= count
            self._room.notify_all()

    def _replace_if_stuck(self, engine: Any, session: str) -> None:
        """A new engine in the place of one that failed towards a peer that is there."""
        try:
            if engine.send_probe(session) != 0:
                return
            with self._lock:
                if self._engine is engine:
                    self._replace(session)
        except Exception:
            logger.exception("sglang-mixkv could not replace the transfer engine")

    def _replace(self, session: str) -> None:
        if len(self._retired) >= MOST_ENGINES:
            logger.error(
                "sglang-mixkv: transfers to %s fail although it answers, and the transfer engine "
                "was replaced %d times already; restart this server", session, MOST_ENGINES,
            )  # fmt: skip
            return
        fresh = self._make()
        code = fresh.batch_register(list(self._memory), list(self._memory.values()))
        if code != 0:
            raise RuntimeError(f"registering memory with a new engine returned {code}")
        self._retired.append(self._engine)
        self._engine = fresh
        logger.warning(
            "sglang-mixkv: a transfer to %s failed although it answers; the transfer engine was "
            "replaced", session,
        )  # fmt: skip


def _submit(mooncake: Any, session: str, one: tuple[int, int, int]) -> int:
    """Mooncake's number of this write; 0 if it was turned down."""
    try:
        number = int(mooncake.transfer_submit_write(session, *one))
    except Exception:
        logger.exception("sglang-mixkv could not begin a write to %s", session)
        return 0
    return number if 0 < number < 1 << 63 else 0  # a pointer, 0, or -1 as it may be unsigned


def patience_s() -> float:
    """Seconds after which Mooncake gives up a call that waits: MC_TRANSFER_TIMEOUT, at least 5."""
    said = os.environ.get("MC_TRANSFER_TIMEOUT", "")
    return max(5.0, float(said)) if said.isdecimal() else GIVE_UP_S


def _outcome(mooncake: Any, number: int, deadline: float) -> int:
    """0 when this write is done; -1 if it failed, was turned down, or is not done by then.
    Mooncake forgets the number of one that ended."""
    try:
        while number and (state := int(mooncake.transfer_check_status(number))) <= 0:
            if state < 0 or time.monotonic() > deadline:
                return -1
            time.sleep(POLL_S)
    except Exception:
        logger.exception("sglang-mixkv does not know what became of a write")
        return -1
    return 0 if number else -1
