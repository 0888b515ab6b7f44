"""What a transfer thread works on, and what the transport has said of it so far.

Where a send raises, everything that was handed to the transport before has to have ended: with
code 0 the room alone fails, with any other a write may still go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sglang_mixkv.transfer.digest import Digester
from sglang_mixkv.transfer.writer import ChunkWriter


class Current(threading.local):
    """One for a manager; its attributes are each thread's own.

    `chunk`: SGLang's, None in a thread that takes none. `code`: the first of this send that is
    not 0. `writes`: of this send, on SGLang's executor.
    """

    chunk: Any = None
    writer: ChunkWriter | None = None
    digester: Digester | None = None
    code = 0

    def __init__(self) -> None:
        self.writes: list[Future[int]] = []

    def begin(self) -> None:
        """Another send begins."""
        self.code = 0
        self.writes.clear()

    def settle(self) -> int:
        """Wait for what SGLang's executor still writes. 0, or the first code that is not."""
        for write in self.writes:
            failed = write.cancel() or write.exception() is not None
            self.code = self.code or (0 if failed else int(write.result()))
        return self.code


class TappedQueue:
    """SGLang's transfer queue, with the chunk that a transfer thread works on kept for it."""

    def __init__(self, queue: Any, current: Current) -> None:
        self._queue, self._current = queue, current

    def get(self) -> Any:
        self._current.chunk = chunk = self._queue.get()
        return chunk

    def put(self, chunk: Any) -> None:
        self._queue.put(chunk)


class TappedExecutor:
    """SGLang's executor of one transfer thread, with its writes kept for that thread."""

    def __init__(self, executor: ThreadPoolExecutor, current: Current) -> None:
        self._executor, self._current = executor, current

    def submit(self, write: Callable[..., int], *args: Any) -> Future[int]:
        future = self._executor.submit(write, *args)
        self._current.writes.append(future)
        return future
