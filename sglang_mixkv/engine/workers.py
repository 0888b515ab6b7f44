"""Threads that each do one piece of work for one prefill server, and what waiting for it may cost.

A server that is hung holds its own thread, and nobody else's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

AT_ONCE = 128
WAITS_S, WAIT_SHARE = 0.4, 0.05


class Work(Future[Any]):
    """`took`: seconds, once it is done."""

    took = 0.0


class Workers:
    """AT_ONCE of them at most. Work that has failed before gets half of them at most, so that a new
    server need not wait for those that are hung."""

    def __init__(self) -> None:
        self._lock, self._busy, self._closed = threading.Lock(), 0, False

    def start(self, do: Callable[[], object], *, failed: bool) -> Work | None:
        """None where no thread is left for it."""
        work = Work()
        thread = threading.Thread(target=self._run, args=(do, work), name="mixkv-ask", daemon=True)
        with self._lock:
            if self._closed or self._busy >= (AT_ONCE // 2 if failed else AT_ONCE):
                return None
            self._busy += 1
        try:
            thread.start()
        except RuntimeError:  # the process has no more
            self._end()
            return None
        return work

    def _run(self, do: Callable[[], object], work: Work) -> None:
        began = time.monotonic()
        try:
            found = do()
        except BaseException as error:
            self._end()
            work.took = time.monotonic() - began
            work.set_exception(error)
        else:
            self._end()
            work.set_result(found)

    def _end(self) -> None:
        with self._lock:
            self._busy -= 1

    def close(self) -> None:
        """Nothing is begun any more."""
        with self._lock:
            self._closed = True


class Patience:
    """Of a thread that must not stand still: WAITS_S at once, and WAIT_SHARE of its time in the
    long run. One that is waited for gets half of what is left, so that there is always some."""

    def __init__(self) -> None:
        self._left, self._seen = WAITS_S, time.monotonic()

    def wait(self, work: Work, most: float) -> float:
        """For it to be done, `most` seconds or less. How many it took."""
        began = time.monotonic()
        self._left = min(WAITS_S, self._left + WAIT_SHARE * (began - self._seen))
        wait([work], min(most, self._left / 2))
        self._seen = time.monotonic()
        self._left -= self._seen - began
        return self._seen - began
