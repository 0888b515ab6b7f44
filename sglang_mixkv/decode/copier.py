"""The thread of a decode rank that copies rows from slots to the pool, and clears rows."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_mixkv.channel.gate import Gate
from sglang_mixkv.decode import events as ev
from sglang_mixkv.draft.slot_format import SlotCheck

if TYPE_CHECKING:
    from sglang_mixkv.draft.rows import DraftRows, Staging

logger = logging.getLogger(f"sglang.{__name__}")

STALE = {SlotCheck.STALE: "the slot was used again", SlotCheck.DIFFERS: "its checksum differs"}


class Entry:
    """One room, as the scheduler's thread sees it. `pages`: of `page_size` tokens, the draft
    pool's, from `opened.first_token` on. `event`: with `query() -> bool`, or None. `prefill`: its
    server's bootstrap address. `request`: SGLang's, once the queue has handed it over."""

    request: Any = None

    def __init__(
        self, opened: ev.OpenRoom, pages: Any, page_size: int, event: Any, prefill: str = ""
    ) -> None:
        self.opened, self.event, self.gate = opened, event, Gate()
        self.prefill = prefill
        self._pages, self._size = np.asarray(pages, dtype=np.int64), page_size
        self.state: ev.State | None = None
        self.reason = ""
        self.bytes = 0
        self.arrived = self.closed = False

    def rows(self, first: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row numbers of tokens [first, end) of the prompt."""
        tokens = np.arange(first, end) - self.opened.first_token
        return self._pages[tokens // self._size] * self._size + tokens % self._size


class Copier:
    """Every job goes through its room's gate. `done`: takes each JobDone, from this thread."""

    def __init__(
        self,
        rows: DraftRows,
        staging: Staging,
        entries: Mapping[ev.Generation, Entry],
        done: Callable[[ev.JobDone], None],
        moved: Callable[[int, float], None],
    ) -> None:
        self._rows, self._staging, self._entries, self._done = rows, staging, entries, done
        self._moved = moved
        self._work: queue.SimpleQueue[ev.Unpack | ev.Clear | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="mixkv-copy", daemon=True)
        self.thread.start()

    def put(self, job: ev.Unpack | ev.Clear) -> None:
        self._work.put(job)

    def close(self) -> None:
        self._work.put(None)
        self.thread.join(2)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            self._done(self._copy(job))

    def _copy(self, job: ev.Unpack | ev.Clear) -> ev.JobDone:
        entry = self._entries.get(job.generation)
        if entry is None or not entry.gate.enter():
            return ev.JobDone(job.job, ev.Result.CLOSED)
        try:
            if isinstance(job, ev.Clear):
                self._rows.clear(entry.rows(job.first_token, job.end))
                return ev.JobDone(job.job, ev.Result.DONE)
            return self._unpack(job, entry)
        except Exception as error:
            logger.exception("[MIXKV-SELF-01] draft KV could not be copied")
            return ev.JobDone(job.job, ev.Result.ERROR, repr(error)[:300])
        finally:
            entry.gate.leave()

    def _unpack(self, job: ev.Unpack, entry: Entry) -> ev.JobDone:
        slot, heads = self._staging.slot(job.slot), len(job.heads)
        check = self._rows.verify(slot, job.tokens, heads, job.stamp)
        if check is not SlotCheck.OK:
            return ev.JobDone(job.job, ev.Result.STALE, STALE[check])
        rows = entry.rows(job.first_token, job.first_token + job.tokens)
        started = time.perf_counter()
        self._rows.unpack(rows, job.heads, slot)
        seconds = time.perf_counter() - started
        size = job.tokens * self._rows.bytes_per_token(heads)
        entry.bytes += size
        self._moved(size, seconds)
        return ev.JobDone(job.job, ev.Result.DONE)

    def clear_now(self, entry: Entry) -> None:
        """In the caller's thread, where the others have ended: the whole room, cold."""
        try:
            entry.gate.close()
            self._rows.clear(entry.rows(entry.opened.first_token, entry.opened.end))
            entry.reason, entry.state = "broken", ev.State.COLD
        except Exception as error:
            entry.reason, entry.state = repr(error), ev.State.FAILED
