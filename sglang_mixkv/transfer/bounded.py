"""A sender's engine over TCP, within the limits of Mooncake's TCP transport.

The transport fails above some 2,048 ranges in flight an engine and peer, and after such an
overflow the engine can be stuck towards that peer for good: each call returns -1 after a
second, while the peer still answers a probe. So all threads together have at most
MAX_DESCRIPTORS ranges in flight, and an engine whose call failed although the peer answers is
replaced by a new one, with the same memory registered. A peer does not notice: the engine's
own session is never told to it.

The failed call is not repeated: bytes of it may still arrive, and the request that it belongs
to fails. The old engine is kept, since ending it takes a second in which Python stands still.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_mixkv.transfer.direct import MAX_DESCRIPTORS

logger = logging.getLogger(__name__)

MOST_ENGINES = 8


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
            with self._held(len(lengths[part])):
                engine = self._engine
                code: int = engine.batch_transfer_sync(
                    session_id, buffers[part], peer_buffer_addresses[part], lengths[part]
                )
            if code != 0:
                self._replace_if_stuck(engine, session_id)
                return code
        return 0

    @contextmanager
    def _held(self, count: int) -> Iterator[None]:
        """Room for so many ranges, in the order of asking: a large call is not passed by."""
        with self._turn, self._room:
            self._room.wait_for(lambda: self._in_flight + count <= self._limit)
            self._in_flight += count
        try:
            yield
        finally:
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
