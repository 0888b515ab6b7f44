"""Bytes counted where they are handed to the transport, by component.

With `SGLANG_MIXKV_STATS_DIR` set, each process keeps one small JSON file there, rewritten
whole after each request; without it counting costs an addition a chunk.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path


class Stats:
    """Counters of one process, safe to use from several threads."""

    def __init__(self, role: str, folder: str = "") -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._path = Path(folder, f"{role}-{os.getpid()}.json") if folder else None

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def publish(self) -> None:
        """Rewrite the file, if one was asked for. Never raises: figures are not worth a request."""
        if self._path is None:
            return
        partial = self._path.with_suffix(".tmp")
        try:
            with self._lock:
                partial.write_text(json.dumps(self._counts))
                partial.replace(self._path)
        except OSError:
            self._path = None
