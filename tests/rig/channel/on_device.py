"""A stand-in for GpuRows on the CPU, with the methods that the channel calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.slot_format import SlotCheck

from .threads import PAGE


class Ticket:
    error = ""

    def __init__(self, results: list[SlotCheck], until: float) -> None:
        self.results, self._until = results, until

    def over(self) -> bool:
        return time.perf_counter() >= self._until

    done = over


class OnDevice:
    """Copies with numpy when a batch starts. The batch completes `took` seconds later, or that long
    after the previous batch."""

    max_batch, can_start, took = 2, True, 0.0

    def __init__(self, rows: DraftRows, staging: Staging) -> None:
        self.rows, self.staging, self._free = rows, staging, 0.0

    def pages(self, numbers: Any) -> Pages:
        return Pages(np.asarray(numbers), PAGE)

    def job(
        self, pages: Pages, first: int, tokens: int, heads: range | None = None, slot: int = 0,
        stamp: int = 0,
    ) -> tuple[Any, ...]:  # fmt: skip
        rows = pages.rows(first, tokens)
        return (rows,) if heads is None else (rows, heads, self.staging.slot(slot), stamp)

    def start(self, what: str, jobs: Sequence[Any]) -> Ticket:
        copy: Callable[..., SlotCheck | None] = getattr(self.rows, what)
        results = [copy(*job) or SlotCheck.OK for job in jobs]
        self._free = max(self._free, time.perf_counter()) + self.took
        return Ticket(results, self._free)
