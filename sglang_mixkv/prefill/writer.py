"""From a plan and the pages of one chunk to bytes at the peer: one transfer thread's worker.

    plan, chunk, grant -> ways: ranges as they are, and slices to pack
                       -> rounds through the pack buffer, each a list of ranges
                       -> transport

Where a copy takes about as long as a write (host memory), rounds are asynchronous: the next one
is packed while the last is in flight.

    pack 1 | pack 2  | pack 3      | settle ...... |
           | write 1 | write 2 ------ | write 3 -- |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.extents import extent_blocks, extents
from sglang_mixkv.kv.plan import Copies, Ints, Plan
from sglang_mixkv.kv.ranges import Blocks, PagePairs, token_blocks, whole_blocks
from sglang_mixkv.prefill.packing import PackBuffer, Packing
from sglang_mixkv.protocol.extension import Grant
from sglang_mixkv.rows.host import Rows
from sglang_mixkv.transport.base import Transport

NO_GRANT = Grant(0, 0)

Ways = tuple[list[Blocks], list[Packing]]


@dataclass(frozen=True)
class Chunk:
    """The pages of one chunk, source and destination side by side.

    `start`: pages of the request sent before it; `firsts`: the request's first page that each of
    the plan's draft is sent from; `room_pages`: all destination pages of the request.
    """

    src_pages: Ints
    dst_pages: Ints
    start: int = 0
    firsts: tuple[int, ...] = (0,)
    room_pages: Ints | None = None

    @property
    def skips(self) -> list[int]:
        """How many of its pages are before each of `firsts`."""
        return [min(len(self.src_pages), max(0, first - self.start)) for first in self.firsts]

    def parts(self, most: int) -> Iterator[Chunk]:
        """The chunk in parts of at most `most` pages; 0: as it is."""
        count = len(self.src_pages)
        for first in range(0, max(1, count), most if most > 0 else max(1, count)):
            part = slice(first, first + most if most > 0 else None)
            src, dst = self.src_pages[part], self.dst_pages[part]
            yield replace(self, src_pages=src, dst_pages=dst, start=self.start + first)

    def grants(self, plan: Plan, grant: Grant) -> Iterator[Grant]:
        """The part of a grant for each of the plan's draft, one after the other in a region."""
        address = grant.address
        for reach, first in zip(plan.draft, self.firsts, strict=True):
            first = max(first, grant.first_page)
            tokens = max(0, grant.tokens - (first - grant.first_page) * plan.page_size)
            yield msgspec.structs.replace(grant, address=address, tokens=tokens, first_page=first)
            address += tokens * reach.copies.bytes_per_token

    def by_extent(
        self, copies: Copies, page_size: int, pairs: PagePairs, grant: Grant, first: int
    ) -> Blocks:
        """Ranges for its last pages, `pairs`, in the extents of the request's pages from `first`
        on. Raises MixKVError where they are not at their place among those."""
        if not grant.extent:
            return extent_blocks(copies, extents(pairs.dst, page_size, 0), page_size, 0, pairs.src)
        pages = self.dst_pages[:0] if self.room_pages is None else self.room_pages[first:]
        start = self.start + len(self.src_pages) - len(pairs) - first
        if start < 0 or not np.array_equal(pages[start : start + len(pairs)], pairs.dst):
            raise MixKVError(
                "MIXKV-SEND-01",
                f"this chunk's {len(pairs)} pages are not the request's from page {start + first} "
                "on; nothing of this chunk was sent",
            )
        return extent_blocks(
            copies, extents(pages, page_size, grant.extent), page_size, start, pairs.src
        )


@dataclass(frozen=True)
class Written:
    """What became of a chunk: the transport's code, bytes by component as the plan has them,
    and ranges and bytes as they were handed to the transport."""

    code: int
    target_bytes: int
    draft_bytes: int
    descriptors: int
    packed_bytes: int
    wire_bytes: int


@dataclass
class Sending:
    """The writes of one chunk. `code`: 0, or the first known code that is not."""

    transport: Transport
    session: str
    code: int = 0
    descriptors: int = 0
    bytes: int = 0
    _open: list[Any] = field(default_factory=list)

    def write(self, blocks: Blocks, *, overlap: bool = False) -> None:
        """Nothing is written after a failure."""
        if self.code or not len(blocks.length):
            return
        self.descriptors += len(blocks.length)
        self.bytes += blocks.bytes
        handle = self.transport.write(self.session, blocks, overlap=overlap)
        self._open.append(handle)
        if not overlap:
            code = self.transport.wait(self._open.pop())
            self.code = self.code or code

    def settle(self) -> int:
        """Wait until nothing of the chunk is in flight: the code."""
        while self._open:
            code = self.transport.wait(self._open.pop(0))
            self.code = self.code or code
        return self.code


class ChunkWriter:
    """Writes chunks for one thread, packing through a buffer that is made at the first need.

    `most_pages`: so many at a time (SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES); 0: a whole chunk.
    """

    def __init__(
        self,
        transport: Transport,
        rows: Rows,
        make_buffer: Callable[[], PackBuffer | None],
        mode: str,
        most_pages: int = 0,
    ) -> None:
        self._transport, self._rows, self._mode = transport, rows, mode
        self._most_pages = most_pages
        self._limits = transport.limits
        self._overlap = self._limits.overlaps and rows.takes_long
        self._make_buffer = make_buffer
        self._buffer: PackBuffer | None = None

    def write(self, session: str, plan: Plan, chunk: Chunk, grant: Grant | None = None) -> Written:
        """Write one chunk, target and draft. With code 0 nothing of it is in flight any more.

        Raises what packing raises, and MixKVError for pages outside the granted region. Then
        nothing of the chunk is in flight either, unless the transport failed as well: that is
        returned as its code.
        """
        parts = [self._ways(plan, p, grant or NO_GRANT) for p in chunk.parts(self._most_pages)]
        sending, packed = Sending(self._transport, session), 0
        try:
            for direct, packings in parts:
                packed += self._send(sending, Blocks.concat(direct), packings, plan.page_size)
        except Exception:
            if sending.settle() == 0:
                raise
        return Written(
            sending.settle(),
            len(chunk.src_pages) * plan.target_bytes_per_page,
            plan.draft_bytes(len(chunk.src_pages) - skip for skip in chunk.skips),
            sending.descriptors,
            packed,
            sending.bytes,
        )

    def _send(
        self, sending: Sending, direct: Blocks, packings: list[Packing], page_size: int
    ) -> int:
        """Bytes that were packed. What needs no packing goes with the first round, or, where
        rounds are asynchronous, after all of them."""
        packed, rounds, overlap = 0, self._rounds(sending, packings, page_size), self._overlap
        if self._fits_at_once(packings, page_size):
            rounds, overlap = iter([Blocks.concat(rounds)]), False
        for blocks in rounds:
            if sending.code:
                break
            packed += blocks.bytes
            if overlap:
                sending.write(blocks, overlap=True)
            else:
                sending.write(Blocks.concat([direct, blocks]))
                direct = Blocks.none()
        sending.write(direct)
        return packed

    def _rounds(
        self, sending: Sending, packings: list[Packing], page_size: int
    ) -> Iterator[Blocks]:
        if packings and self._buffer is not None:
            yield from self._buffer.rounds(self._rows, page_size, packings, sending.settle)

    def _fits_at_once(self, packings: list[Packing], page_size: int) -> bool:
        """Whether all of it is small: one round each, and together no more than the buffer."""
        if self._buffer is None or not packings:
            return False
        sizes = [len(p.pairs) * p.copies.bytes_per_token * page_size for p in packings]
        return all(len(p.cuts) == 1 for p in packings) and sum(sizes) <= self._buffer.size

    # -- which way each part goes

    def _ways(self, plan: Plan, chunk: Chunk, grant: Grant) -> Ways:
        """Everything of this chunk, as ranges or as something to pack."""
        pairs = PagePairs(chunk.src_pages, chunk.dst_pages)
        size = plan.page_size
        ways = [*self._to_pool(plan.target, size, pairs, chunk, grant, 0)]
        drafts = zip(plan.draft, chunk.skips, chunk.grants(plan, grant), strict=True)
        for reach, skip, part in drafts:
            reached = pairs.cut(skip) if skip else pairs
            if grant.tokens:
                ways += self._to_region(reach.copies, size, reached, chunk, part)
            else:
                ways += self._to_pool(reach.copies, size, reached, chunk, part, part.first_page)
        direct = [way for way in ways if isinstance(way, Blocks)]
        return direct, [way for way in ways if isinstance(way, Packing)]

    def _to_pool(
        self, copies: Copies, page_size: int, pairs: PagePairs, chunk: Chunk, grant: Grant,
        first: int,
    ) -> Iterator[Blocks | Packing]:  # fmt: skip
        """`first`: the request's page from which on they are wanted."""
        if not len(pairs):
            return
        whole, fill, part = copies.parts.whole, copies.parts.fill, copies.parts.part
        if len(whole):
            yield whole_blocks(whole, page_size, pairs.runs)
        if len(fill):
            yield self._fill(fill, page_size, pairs)
        if len(part) and grant.by_page:
            yield chunk.by_extent(part, page_size, pairs, grant, first)
        elif len(part):
            yield token_blocks(part, page_size, pairs.src, pairs.dst)

    def _to_region(
        self, copies: Copies, page_size: int, pairs: PagePairs, chunk: Chunk, grant: Grant
    ) -> Iterator[Blocks | Packing]:
        """The chunk's last pages, `pairs`, into the region: page after page of the request, from
        its first."""
        if not len(pairs) or not len(copies):
            return
        first = chunk.start + len(chunk.src_pages) - len(pairs) - grant.first_page
        if first < 0 or (first + len(pairs)) * page_size > grant.tokens:
            raise MixKVError(
                "MIXKV-SEND-01",
                f"pages {first}..{first + len(pairs) - 1} of a region of {grant.tokens} tokens; "
                "nothing of this chunk was sent",
            )
        pairs = PagePairs(pairs.src, np.arange(first, first + len(pairs), dtype=np.int64))
        parts = copies.region.parts
        if len(parts.whole):
            whole = parts.whole.placed(grant.address, grant.tokens)
            packed = self._packed(whole, page_size, pairs, len(pairs.runs[0]))
            yield packed or whole_blocks(whole, page_size, pairs.runs)
        if len(parts.fill):
            fill = parts.fill.placed(grant.address, grant.tokens)
            yield self._fill(fill, page_size, pairs)

    def _fill(self, fill: Copies, page_size: int, pairs: PagePairs) -> Blocks | Packing:
        """Slices that fill the destination's row: packed, or one range per token."""
        packed = self._packed(fill, page_size, pairs, len(pairs) * page_size)
        return packed or token_blocks(fill, page_size, pairs.src, pairs.dst)

    def _packed(
        self, copies: Copies, page_size: int, pairs: PagePairs, ranges: int
    ) -> Packing | None:
        """These copies to be packed; None where the rule says no, where that would not halve
        the `ranges` each of them needs otherwise, or where a page does not fit."""
        if 2 * len(pairs.dst_runs[0]) > ranges:
            return None
        per_page = copies.bytes_per_token * page_size
        size = per_page * len(pairs)
        if not self._limits.worth_packing(ranges * len(copies), size, self._mode):
            return None
        self._buffer = self._buffer or self._make_buffer()
        if self._buffer is None or per_page > self._buffer.size:
            return None
        for overlap in (self._overlap, False):
            cuts = self._buffer.cuts(copies, page_size, len(pairs), overlap)
            needed = len(pairs.dst_runs[0]) + len(cuts) - 1  # a round ends a run
            begun = len(copies) * needed if overlap else 0
            if 2 * needed <= ranges and begun <= self._limits.begun:
                return Packing(copies, pairs, cuts)
        return None
