"""One daemon thread for what must not be done in the scheduler's loop."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# Calls that wait at most; more are dropped: all of them are best effort.
MAX_WAITING = 1 << 17

Job = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Background:
    """Runs calls one after the other, in the order of their due times.

    `submit` is cheap and never waits. What a call raises is logged; the thread starts with
    the first call.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._due: list[Job] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[..., None], *args: Any, delay: float = 0.0) -> bool:
        """Have `call(*args)` run after `delay` seconds. False: too much waits already."""
        if len(self._due) + self._inbox.qsize() >= MAX_WAITING:
            return False
        self._inbox.put((time.monotonic() + delay, next(self._numbers), call, args))
        if self._thread is None:
            self._start()
        return True

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mixkv-background")
                self._thread.daemon = True
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._collect()
            _, _, call, args = heapq.heappop(self._due)
            try:
                call(*args)
            except Exception:
                logger.exception("[MIXKV-SELF-01] sglang-mixkv: a call in the background failed")

    def _collect(self) -> None:
        """Take in what was submitted; return when a call is due."""
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            try:
                job = self._inbox.get(wait != 0.0, wait)
            except queue.Empty:
                if self._due and self._due[0][0] <= time.monotonic():
                    return
                continue
            heapq.heappush(self._due, job)
