"""CRC-32 of the rows of a plan, for `--mixkv-verify checksum`.

One checksum per entry, over the rows in the order of the request's pages: chunk after chunk
it goes on where it stopped, so both sides agree whatever the chunks were.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from sglang_mixkv.kv.plan import Copies, Ints, Plan, into_region
from sglang_mixkv.rows.host import Buffer, RowCopy, RowNumbers, Rows
from sglang_mixkv.rows.slices import rows_of

SCRATCH = 16 << 20


@dataclass
class Sums:
    """Checksums so far, one per copy of the plan; the drafter's by window."""

    target: list[int] = field(default_factory=list)
    draft: list[list[int]] = field(default_factory=list)


class Digester:
    """One thread's reader: rows are gathered into a scratch buffer, checksums made on the host."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._scratch: Buffer | None = None

    def add_chunk(self, sums: Sums, plan: Plan, pages: Ints, skips: list[int]) -> None:
        """Take in what a sender sent of its pages; `skips`: how many before each window."""
        sums.target = self.add(sums.target, plan.target, plan.page_size, pages)
        so_far = sums.draft or [[] for _ in plan.draft]
        sums.draft = [
            self.add(found, reach.copies, plan.page_size, pages[skip:])
            for found, reach, skip in zip(so_far, plan.draft, skips, strict=True)
        ]

    def add(self, so_far: list[int], copies: Copies, page_size: int, pages: Ints) -> list[int]:
        """The checksums, one per copy, with the source rows of these pages taken in."""
        found = so_far or [0] * len(copies)
        if not len(copies):
            return found
        per_page = int(copies.width.sum()) * page_size
        if self._scratch is None or self._scratch.size < per_page:
            self._scratch = self._rows.allocate(max(SCRATCH, per_page))
        step = self._scratch.size // per_page
        for start in range(0, len(pages), step):
            part = rows_of(pages[start : start + step], page_size)
            found = self._add(found, copies, part, self._scratch)
        return found

    def _add(
        self, so_far: list[int], copies: Copies, src_rows: RowNumbers, scratch: Buffer
    ) -> list[int]:
        count = len(src_rows)
        there = into_region(copies, scratch.address, count)
        self._rows.copy(
            RowCopy(
                src=copies.src + copies.src_offset,
                dst=there.dst,
                src_stride=copies.src_row,
                dst_stride=copies.width,
                width=copies.width,
                src_rows=src_rows,
                dst_rows=range(count),
            )
        )
        ends = np.cumsum(copies.width) * count
        data = self._rows.read(scratch, int(ends[-1]))
        starts = ends - copies.width * count
        return [
            zlib.crc32(data[start:end], crc)
            for crc, start, end in zip(so_far, starts.tolist(), ends.tolist(), strict=True)
        ]


def pairs(copies: Copies, sums: list[int]) -> tuple[tuple[int, int], ...]:
    """(destination entry, checksum) of each copy, as the wire's Digest has them."""
    return tuple(zip(copies.dst.tolist(), sums, strict=True))
