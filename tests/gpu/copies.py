"""A request's rows through slots, in each of the product's ways: by torch, and on CUDA by its
kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from sglang_mixkv.draft.layout import SlotCheck
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.rows_gpu import GpuRows, Ticket, gpu_rows

from .pools import STAMP, Ints


class Request(NamedTuple):
    """`numbers`: rows of its tokens. `cuts`: tokens of slot `slot`, of the next one, and so on."""

    numbers: Ints
    heads: range
    cuts: list[range]
    slot: int = 0

    def rows(self, cut: range) -> Ints:
        return self.numbers[cut.start : cut.stop]


class Torch:
    def __init__(self, entries: list[Tensor], heads: range, page: int, staging: Staging) -> None:
        self._rows, self._staging = DraftRows(entries, heads, by_numpy=False), staging

    def pack(self, request: Request) -> None:
        for number, cut in enumerate(request.cuts, request.slot):
            slot = self._staging.slot(number)
            self._rows.pack(request.rows(cut), request.heads, slot, STAMP + number)

    def unpack(self, request: Request) -> list[SlotCheck]:
        """Of the slots that are right."""
        found = []
        for number, cut in enumerate(request.cuts, request.slot):
            slot, rows = self._staging.slot(number), request.rows(cut)
            found.append(self._rows.unpack(rows, request.heads, slot, STAMP + number))
        return found

    def clear(self, request: Request, cut: range) -> None:
        self._rows.clear(request.rows(cut))


class Kernels:
    def __init__(self, entries: list[Tensor], heads: range, page: int, staging: Staging) -> None:
        self.rows, self._page = kernels(DraftRows(entries, heads), page, staging), page
        self._made: tuple[Ints, memoryview] | None = None

    def pack(self, request: Request) -> None:
        assert set(ended(self.start("pack", request))) == {SlotCheck.OK}

    def unpack(self, request: Request) -> list[SlotCheck]:
        return ended(self.start("unpack", request))

    def clear(self, request: Request, cut: range) -> None:
        job = self.rows.job(self._pages(request), cut.start, len(cut))
        assert ended(self.rows.start_clear([job])) == [SlotCheck.OK]

    def start(self, kind: str, request: Request) -> Ticket:
        """One batch."""
        pages = self._pages(request)
        jobs = [
            self.rows.job(pages, cut.start, len(cut), request.heads, number, STAMP + number)
            for number, cut in enumerate(request.cuts, request.slot)
        ]
        ticket: Ticket = getattr(self.rows, f"start_{kind}")(jobs)
        return ticket

    def _pages(self, request: Request) -> memoryview:
        """Made once for all batches of the same rows, as the channel does."""
        if self._made is None or self._made[0] is not request.numbers:
            pages = self.rows.pages(request.numbers[:: self._page] // self._page)
            self._made = request.numbers, pages
        return self._made[1]


def ended(ticket: Ticket) -> list[SlotCheck]:
    """It is asked as the channel's thread does."""
    while not ticket.done():
        pass
    assert not ticket.error, ticket.error
    return ticket.results()


WAYS: dict[str, tuple[Any, ...]] = {"cpu": (Torch,), "cuda": (Torch, Kernels)}


def kernels(rows: DraftRows, page: int, staging: Staging) -> GpuRows:
    found = gpu_rows(rows, page, staging)
    assert isinstance(found, GpuRows), found
    return found
