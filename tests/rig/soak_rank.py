"""A rank of a soak: what those of both sides do with a request, and the memory they hand out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rig.memory import AUX_LENS
from rig.rank import Rank, reason_of
from rig.resources import resources
from rig.soak_case import Meeting, Report, SoakCase

STUCK_S = 90.0  # more than all timeouts together
MAX_WRONG = 20


class Board:
    """Each rank's status of each request, of one server: it is the lowest of them that counts, as
    with SGLang's poll_and_all_reduce, so that a request ends on all ranks or on none."""

    def __init__(self, context: Any, ranks: int, requests: int) -> None:
        self._ranks, begun = ranks, 1  # KVPoll.Bootstrapping
        self._cells = context.RawArray("b", [begun] * (ranks * requests))

    def agree(self, rank: int, number: int, status: Any) -> int:
        first = number * self._ranks
        self._cells[first + rank] = int(status)
        return min(self._cells[first : first + self._ranks])


class FreeList:
    """First in, first out: what was freed last is used last."""

    def __init__(self, items: Iterable[int]) -> None:
        self._free = deque(items)

    def take(self, count: int) -> np.ndarray | None:
        if len(self._free) < count:
            return None
        return np.array([self._free.popleft() for _ in range(count)], np.int32)

    def give(self, items: Iterable[int]) -> None:
        self._free.extend(items)

    @property
    def free(self) -> np.ndarray:
        return np.array(self._free, np.int64)


@dataclass
class Open:
    """A request that this rank works on."""

    number: int
    handle: Any
    pages: np.ndarray
    row: np.ndarray
    meeting: Meeting | None
    chunks: list[np.ndarray] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    published: bool = False

    def is_to(self, name: str) -> bool:
        """Whether this request meets that fault, on whichever rank."""
        return self.meeting is not None and self.meeting.name == name

    def meets(self, name: str, rank: int) -> bool:
        return self.is_to(name) and self.meeting is not None and self.meeting.rank == rank

    @property
    def part(self) -> float:
        return self.meeting.part if self.meeting is not None else 0.0

    @property
    def age(self) -> float:
        return time.monotonic() - self.since


class SoakRank(Rank):
    """A rank that works through all requests, `in_flight` at a time."""

    case: SoakCase

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        case = self.case
        self.report: Report = Report(self.side, self.rank)
        order = np.random.default_rng([case.seed, self.rank]).permutation(case.pool_pages)
        self.pages = FreeList(order.tolist())
        self.rows = FreeList(range(min(64, len(case.requests))))
        self.open: dict[int, Open] = {}
        self.board: Board = case.shared.boards[self.side]

    def _write_truth(self, *_: Any) -> None:
        """Pages get a request's rows when it gets them."""

    def rooms(self) -> list[int]:
        return [self.case.room(n) for n in range(len(self.case.requests))]

    def aux_truth(self, sender: int, number: int, index: int) -> np.ndarray:
        rng = np.random.default_rng([sender, number, index])
        return rng.integers(0, 256, AUX_LENS[index], np.uint8)

    def wrong(self, line: str) -> None:
        if len(self.report.wrong) < MAX_WRONG:
            self.report.wrong.append(line)

    def run(self) -> None:
        """All requests, in order; each ends as a success or as a failure with a reason."""
        total, following = len(self.case.requests), 0
        warm = min(200, total // 3)
        while following < total or self.open or len(self.releases):
            while following < total and self._fits(following) and self._admit(following):
                following += 1
            for one in list(self.open.values()):
                self._step(one)
            self.releases.resolve()
            if not self.report.resources and len(self.report.ended) >= warm:
                self.report.resources.append(resources())
            time.sleep(0.0005)

    def _fits(self, number: int) -> bool:
        return len(self.open) < self.case.soak.in_flight

    def _admit(self, number: int) -> bool:
        """Open the request if there is memory for it."""
        row = self.rows.take(1)
        if row is None:
            return False
        pages = self.pages.take(self.case.pages(self.case.requests[number]))
        if pages is None:
            self.rows.give(row.tolist())
            return False
        self.open[number] = self._begin(number, pages, row, self.case.fault(number))
        return True

    def _step(self, one: Open) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        status = self._status(one, one.handle.poll())
        if status == KVPoll.Success:
            self._succeeded(one)
            self._end(one, "success", "")
        elif status == KVPoll.Failed:
            reason = reason_of(one.handle)
            self._end(one, "failed", reason)
            self._failed(one)
        elif one.age > STUCK_S:
            self.wrong(f"request {one.number} is stuck in {status}, {one.meeting}")
            self._end(one, "stuck", "")
        else:
            self._go_on(one, status)

    def _status(self, one: Open, own: Any) -> Any:
        return self.board.agree(self.rank, one.number, own)

    def _end(self, one: Open, status: str, reason: str) -> None:
        del self.open[one.number]
        self.report.ended[one.number] = (status, reason)

    def _give_back(self, one: Open) -> None:
        self.pages.give(one.pages.tolist())
        self.rows.give(one.row.tolist())

    def _begin(
        self, number: int, pages: np.ndarray, row: np.ndarray, meeting: Meeting | None
    ) -> Open:
        raise NotImplementedError

    def _go_on(self, one: Open, status: Any) -> None:
        raise NotImplementedError

    def _succeeded(self, one: Open) -> None:
        raise NotImplementedError

    def _failed(self, one: Open) -> None:
        raise NotImplementedError
