"""Copies between a pool and slots, started and asked for as reads are. None waits in `start`."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

AT_ONCE = 256 << 10
"""Bytes of a host copy that `start` makes itself: some 30 us, less than a hand-over to a thread."""


class Copies(Protocol):
    def start(self, jobs: Sequence[Any]) -> None: ...

    @property
    def done(self) -> object:
        """True where a job has ended."""

    def ended(self) -> list[tuple[Any, Any]]:
        """Jobs that have ended since it was asked last, in any order, and their results."""

    @property
    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


class HostCopies(Generic[Job, Result]):
    """One thread copies, since a copy in host memory takes a core for as long as it lasts.

    `run`: makes one copy, through its request's gate; it raises nothing. `size`: bytes of a job.
    `wake`: called from the thread once a job has ended.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Job], Result],
        size: Callable[[Job], int],
        wake: Callable[[], None],
        begin: Callable[[], None],
    ) -> None:
        self._do, self._size, self._wake, self._begin = run, size, wake, begin
        self._work: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.done: deque[tuple[Job, Result]] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._size(job) <= AT_ONCE:
                self.done.append((job, self._do(job)))
            else:
                self._work.put(job)

    def ended(self) -> list[tuple[Job, Result]]:
        found = []
        while self.done:
            found.append(self.done.popleft())
        return found

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(2)

    def _run(self) -> None:
        self._begin()
        while (job := self._work.get()) is not None:
            self.done.append((job, self._do(job)))
            self._wake()
