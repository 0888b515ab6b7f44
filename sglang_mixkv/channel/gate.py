"""The gate of a decode room: the pool's rows are written while it is open, and never after.

SGLang gives a request's pages back on the verdict of the group's slowest rank, so a rank can lose
them while its own transfer is going on. `failure_exception`, `abort` and `clear` close the gate
before that, on every rank; closing waits for the one copy that may be under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True

    @contextmanager
    def passing(self) -> Iterator[bool]:
        """Whether rows may be written; they stay the room's own until the block ends."""
        with self._lock:
            yield self._open

    def close(self) -> None:
        with self._lock:
            self._open = False
