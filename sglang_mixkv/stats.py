"""What one process counts, and the file that shows it.

With `SGLANG_MIXKV_STATS_DIR` set, each process has one small JSON file there, rewritten whole after
each request. Without it, counting costs one addition. Nothing here raises: figures are not worth a
request.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from pathlib import Path

from sglang_mixkv.errors import MixKVError


class Stats:
    """Counts of one process, safe to use from several threads."""

    def __init__(self, role: str, folder: str = "") -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, float] = defaultdict(int)
        self._path = Path(folder, f"{role}-{os.getpid()}.json") if folder else None

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def refused(self, error: MixKVError) -> None:
        """A request fails since its prefill server is refused."""
        self.add(**{f"refused_{error.reason}": 1})

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)

    def publish(self) -> None:
        """Rewrite the file, if one was asked for."""
        if self._path is None:
            return
        partial = self._path.with_suffix(".tmp")
        try:
            with self._lock:
                partial.write_text(json.dumps(self._counts))
                partial.replace(self._path)
        except OSError:
            self._path = None
