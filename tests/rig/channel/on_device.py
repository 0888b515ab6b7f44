"""GpuRows without a GPU, as far as the channel uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_mixkv.channel.slot_format import SlotCheck
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows, Staging

from .threads import PAGE


class Ticket:
    error = ""

    def __init__(self, results: list[SlotCheck], until: float) -> None:
        self.results, self._until = results, until

    def over(self) -> bool:
        return time.perf_counter() >= self._until

    done = over


class OnDevice:
    """numpy copies at once. Each batch has ended `took` seconds later, behind the one before."""

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

    def _start(self, copy: Callable[..., SlotCheck | None], jobs: Sequence[Any]) -> Ticket:
        results = [copy(*job) or SlotCheck.OK for job in jobs]
        self._free = max(self._free, time.perf_counter()) + self.took
        return Ticket(results, self._free)

    def start_pack(self, jobs: Sequence[Any]) -> Ticket:
        return self._start(self.rows.pack, jobs)

    def start_unpack(self, jobs: Sequence[Any]) -> Ticket:
        return self._start(self.rows.unpack, jobs)

    def start_clear(self, jobs: Sequence[Any]) -> Ticket:
        return self._start(self.rows.clear, jobs)


class Quick(OnDevice):
    """As long as the kernels are expected to take."""

    max_batch, took = 64, 15e-6
