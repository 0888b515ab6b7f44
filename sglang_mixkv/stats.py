"""What one process counts: the one place that feeds the JSON file and the Prometheus series.

With `SGLANG_MIXKV_STATS_DIR` set, each process keeps one small JSON file there, rewritten
whole after each request. With SGLang's `--enable-metrics` the same counts are series
(`engine/metrics.py`). Without either, counting costs one addition per chunk. Nothing here raises:
figures are not worth a request.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.rows.host import Buffer, RowCopy, Rows


class Metrics(Protocol):
    """Series that show some of the counts (engine/metrics.py). Neither method raises."""

    def add(self, amounts: Mapping[str, float]) -> None: ...

    def set(self, values: Mapping[str, float]) -> None: ...


class Stats:
    """Counts of one process, safe to use from several threads."""

    def __init__(self, role: str, folder: str = "", metrics: Metrics | None = None) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, float] = defaultdict(int)
        self._path = Path(folder, f"{role}-{os.getpid()}.json") if folder else None
        self._metrics = metrics

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount
        if self._metrics is not None:
            self._metrics.add(amounts)

    def refused(self, error: Exception | None = None) -> None:
        """A peer was refused."""
        reason = error.reason if isinstance(error, MixKVError) else "other"
        self.add(**{f"refused_{reason}": 1})

    def cold(self) -> None:
        """A request is served without the prompt's draft KV."""
        self.add(cold_requests=1)

    def staging(self, used: Callable[[], int], size: int) -> None:
        """What the staging buffer holds now, in bytes; asked under the lock, so that the last
        value shown is the last one there was."""
        with self._lock:
            now = {"staging_used": used(), "staging_size": size}
            self._counts.update(now)
            if self._metrics is not None:
                self._metrics.set(now)

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


class TimedRows:
    """`rows`, with the seconds of its copies counted."""

    def __init__(self, rows: Rows, stats: Stats) -> None:
        self._rows, self._stats = rows, stats

    @property
    def takes_long(self) -> bool:
        return self._rows.takes_long

    def warm_up(self) -> None:
        self._rows.warm_up()

    def copy(self, what: RowCopy) -> None:
        started = time.perf_counter()
        self._rows.copy(what)
        self._stats.add(copy_seconds=time.perf_counter() - started)

    def allocate(self, size: int) -> Buffer:
        return self._rows.allocate(size)

    def read(self, buffer: Buffer, size: int) -> memoryview:
        return self._rows.read(buffer, size)
