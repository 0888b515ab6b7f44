"""The packed path: slices are gathered into one buffer, then written in long ranges.

    P < D   a slice is the destination's whole row: pack it, write page runs into the pool, or,
            where those are short, into a region that the receiver granted
    P > D   a slice is part of the destination's row: pack it, write it into the region that
            the receiver granted; the receiver scatters when every sender has answered

Either way a chunk's slices become ranges as long as the destination is contiguous. A chunk
larger than the pack buffer goes through it in several rounds. So does a smaller one where the
next round can be packed while one is in flight (writer.py): a few rounds that begin small, so
that little but the first has to be waited for.

Without room for a region, slices that are part of a row go by extent (kv/extents.py): ranges into
the destination's own pages, which the receiver then puts in the order of rows (rows/slices.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_mixkv.kv.plan import Copies
from sglang_mixkv.kv.ranges import Blocks, PagePairs, run_blocks
from sglang_mixkv.rows.host import Buffer, RowCopy, Rows
from sglang_mixkv.rows.slices import rows_of

FIRST_ROUND = 256 << 10  # bytes per entry, so that rounds do not make ranges short
MANY_ROUNDS = 4  # as large as the first; with less than that, one round is as fast
GROWTH = 4  # of a round to the one before: each takes turns with other threads for the GIL


@dataclass(frozen=True)
class Packing:
    """Copies that go through the pack buffer. `cuts`: the pages of each round."""

    copies: Copies
    pairs: PagePairs
    cuts: list[range]


class PackBuffer(Buffer):
    """One thread's registered buffer."""

    def cuts(self, copies: Copies, page_size: int, pages: int, overlap: bool) -> list[range]:
        """The pages of each round. `overlap`: one can be packed while others are on the wire.
        A page of all entries must fit."""
        per_page = copies.bytes_per_token * page_size
        size = most = self.size // per_page
        first = max(1, len(copies) * FIRST_ROUND // per_page)
        if overlap and most > 1 and pages >= MANY_ROUNDS * first:
            most //= 2
            size = min(most, first)
        found, start = [], 0
        while start < pages:
            found.append(range(start, min(pages, start + size)))
            start, size = start + size, min(most, GROWTH * size)
        return found

    def rounds(
        self, rows: Rows, page_size: int, packings: list[Packing], settle: Callable[[], int]
    ) -> Iterator[Blocks]:
        """Pack and yield the ranges of one round at a time.

        `settle`: wait until nothing reads the buffer; called before any of it is used again.
        No more rounds after it returned another code than 0. Every copy's slice must be
        its destination's whole row.
        """
        at = self.size
        for packing in packings:
            copies = packing.copies
            for pages in packing.cuts:
                need = len(pages) * copies.bytes_per_token * page_size
                if at + need > self.size:
                    if settle():
                        return
                    at = 0
                pairs = packing.pairs.only(pages)
                yield self._round(rows, copies, page_size, pairs, self.address + at)
                at += need

    @staticmethod
    def _round(
        rows: Rows, copies: Copies, page_size: int, pairs: PagePairs, address: int
    ) -> Blocks:
        tokens = len(pairs) * page_size
        area = address + copies.region.dst * tokens
        rows.copy(
            RowCopy(
                src=copies.slices,
                dst=area,
                src_stride=copies.src_row,
                dst_stride=copies.width,
                width=copies.width,
                src_rows=rows_of(pairs.src, page_size),
                dst_rows=range(tokens),
            )
        )
        return run_blocks(area, copies.dst, copies.width * page_size, pairs.dst_runs)
