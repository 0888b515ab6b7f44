"""Simulated memory: one number per row, which encodes the row's prompt, token and heads.

A row of a prefill pool is `row(prompt, token)`. A row in a slot also encodes the packed heads. A
decode pool has one cell per token and head. A slot holds a stamp, rows and a checksum.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from sglang_mixkv.draft.slot_format import SlotCheck

EMPTY = 0  # zeroed
EARLIER = 7  # rows of a request that had these pages before
REUSED = 11  # rows of a request that got these pages afterwards
SPOILED = 17  # bytes of no row, for example if other heads were packed than are unpacked
TOKENS = 64  # every prompt is shorter


class Pool:
    """The rows of one rank, in pages. Each page belongs to one request at a time.

    `owners`: by page, None for a free page. `width`: the number of cells in a row.
    """

    def __init__(self, page: int, width: int) -> None:
        self.page, self._width = page, width
        self.rows: list[list[int]] = []
        self.owners: list[Any] = []
        self._free: deque[int] = deque()

    def take(self, owner: Any, count: int) -> Any:
        """Take unordered pages, the most recently freed ones first."""
        while len(self._free) < count:
            first = len(self.owners)
            self.owners += [None] * 8
            self.rows += [[EARLIER] * self._width for _ in range(8 * self.page)]
            self._free.extend(first + n for n in (3, 6, 1, 4, 7, 2, 5, 0))
        found = [self._free.popleft() for _ in range(count)]
        for page in found:
            self.owners[page] = owner
        self.write(found, EARLIER)
        return np.array(found, dtype=np.int64)

    def give_back(self, pages: Any) -> None:
        """Free pages, and overwrite them as another request would."""
        found = pages.tolist()
        self.write(found, REUSED)
        for page in found:
            self.owners[page] = None
        self._free.extendleft(found)

    def write(self, pages: list[int], value: int) -> None:
        for page in pages:
            for number in range(page * self.page, (page + 1) * self.page):
                self.rows[number][:] = [value] * self._width

    def numbers(self, pages: Any) -> list[int]:
        """Return the rows of these pages."""
        size = self.page
        return [page * size + n for page in pages.tolist() for n in range(size)]


def row(prompt: int, token: int) -> int:
    return (prompt + 1) * TOKENS + token


def packed(row_: int, heads: range) -> int:
    return (row_ << 10) | (heads.start << 5) | heads.stop


def unpacked(piece: int, heads: range) -> int:
    """Return the value that unpacking writes to the cells of these heads."""
    same = (piece >> 5) & 31 == heads.start and piece & 31 == heads.stop
    return piece >> 10 if same else SPOILED


def checksum(pieces: list[int], stamp: int) -> int:
    return hash((stamp, *pieces)) & ((1 << 62) - 1)


def new_slots(count: int) -> list[list[int]]:
    return [[EMPTY] * (TOKENS + 2) for _ in range(count)]


def check(slot: list[int], tokens: int, stamp: int) -> SlotCheck:
    """Check a slot's stamp and checksum against those of a READY, as a reader does."""
    if slot[0] != stamp:
        return SlotCheck.STALE
    same = slot[tokens + 1] == checksum(slot[1 : tokens + 1], stamp)
    return SlotCheck.OK if same else SlotCheck.DIFFERS
