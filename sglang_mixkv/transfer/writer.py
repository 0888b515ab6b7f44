"""One transfer thread's hands: from a plan and a chunk's pages to bytes at the peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.plan import (
    Blocks,
    Copies,
    Ints,
    PagePairs,
    Plan,
    token_blocks,
    whole_blocks,
)
from sglang_mixkv.core.wire import Grant
from sglang_mixkv.transfer import direct
from sglang_mixkv.transfer.ahead import Ahead
from sglang_mixkv.transfer.bounded import BoundedEngine
from sglang_mixkv.transfer.packed import PackBuffer, Packing, prefer_packed
from sglang_mixkv.transfer.rows import Rows

NO_GRANT = Grant(0, 0)
RETRY_S = 60.0  # before a pack buffer is asked for again that could not be had


@dataclass(frozen=True)
class Chunk:
    """The pages of one chunk, source and destination side by side.

    `start`: pages of the request sent before it; `skip`: pages at its front that the
    drafter's window cannot reach.
    """

    src_pages: Ints
    dst_pages: Ints
    start: int = 0
    skip: int = 0

    def parts(self, most: int) -> Iterator[Chunk]:
        """The chunk in parts of at most `most` pages; 0: as it is."""
        count = len(self.src_pages)
        for first in range(0, max(1, count), most if most > 0 else max(1, count)):
            part = slice(first, first + most if most > 0 else None)
            src, dst = self.src_pages[part], self.dst_pages[part]
            skip = min(len(src), max(0, self.skip - first))
            yield Chunk(src, dst, self.start + first, skip)


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


class Unfinished(Exception):
    """This side failed, and a write that it had handed over before failed too: it may go on."""


@dataclass(frozen=True)
class _Batch:
    """Ranges that are written in one go; bytes of them that were packed. `wait`: there is nothing
    to pack meanwhile."""

    blocks: Blocks
    packed: int
    wait: bool


class ChunkWriter:
    """Writes chunks for one thread, packing through a buffer that is made at the first need.

    `most_pages`: so many at a time (SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES); 0: a whole chunk.
    """

    def __init__(
        self,
        engine: direct.Engine,
        rows: Rows,
        make_buffer: Callable[[], PackBuffer | None],
        mode: str,
        most_pages: int = 0,
    ) -> None:
        self._engine, self._rows, self._mode = engine, rows, mode
        self._most_pages = most_pages
        self._overlap = isinstance(engine, BoundedEngine) and rows.takes_long
        self._make_buffer = make_buffer
        self._buffer: PackBuffer | None = None
        self._next_try = 0.0

    def write(self, session: str, plan: Plan, chunk: Chunk, grant: Grant | None = None) -> Written:
        """Write one chunk, target and draft. With code 0 nothing of it is under way any more.

        The same is true where it raises, except for Unfinished. Raises MixKVError, with nothing
        written, for pages outside the granted region.
        """
        parts = chunk.parts(self._most_pages)
        ways = [list(self._ways(plan, part, grant or NO_GRANT)) for part in parts]
        ahead = Ahead(self._engine, session)
        descriptors, packed_bytes, wire_bytes = 0, 0, 0
        try:
            for batch in chain.from_iterable(self._batches(w, plan.page_size, ahead) for w in ways):
                descriptors += len(batch.blocks.length)
                packed_bytes += batch.packed
                wire_bytes += batch.blocks.bytes
                if ahead.write(batch.blocks, batch.wait):
                    break
        except Exception as error:
            if ahead.settle():
                raise Unfinished(f"{error!r}, while another write of the chunk failed") from error
            raise
        return Written(
            ahead.settle(),
            len(chunk.src_pages) * plan.target_bytes_per_page,
            max(0, len(chunk.src_pages) - chunk.skip) * plan.draft_bytes_per_page,
            descriptors,
            packed_bytes,
            wire_bytes,
        )

    def _ways(self, plan: Plan, chunk: Chunk, grant: Grant) -> Iterator[Blocks | Packing]:
        """Everything of this chunk, as ranges or as something to pack."""
        pairs = PagePairs(chunk.src_pages, chunk.dst_pages)
        draft_pairs = pairs.cut(chunk.skip) if chunk.skip else pairs
        yield from self._to_pool(plan.target, plan.page_size, pairs, grant)
        if grant.tokens:
            yield from self._to_region(plan, chunk, draft_pairs, grant)
        else:
            yield from self._to_pool(plan.draft, plan.page_size, draft_pairs, grant)

    def _to_pool(
        self, copies: Copies, page_size: int, pairs: PagePairs, grant: Grant
    ) -> Iterator[Blocks | Packing]:
        if not len(pairs):
            return
        whole, fill, part = copies.parts.whole, copies.parts.fill, copies.parts.part
        if len(whole):
            yield whole_blocks(whole, page_size, pairs.runs)
        if len(fill):
            yield self._fill(fill, page_size, pairs)
        if len(part) and grant.by_page:
            yield token_blocks(part.paged(page_size), 1, pairs.src, pairs.dst)
        elif len(part):
            yield token_blocks(part, page_size, pairs.src, pairs.dst)

    def _to_region(
        self, plan: Plan, chunk: Chunk, pairs: PagePairs, grant: Grant
    ) -> Iterator[Blocks | Packing]:
        """The draft slices into the region: page after page of the request, from its first."""
        if not len(pairs) or not len(plan.draft):
            return
        first = chunk.start + chunk.skip - grant.first_page
        if first < 0 or (first + len(pairs)) * plan.page_size > grant.tokens:
            raise MixKVError(
                f"pages {first}..{first + len(pairs) - 1} of a region of {grant.tokens} tokens; "
                "nothing of this chunk was sent"
            )
        pairs = PagePairs(pairs.src, np.arange(first, first + len(pairs), dtype=np.int64))
        parts = plan.draft.region.parts
        if len(parts.whole):
            whole = parts.whole.placed(grant.address, grant.tokens)
            packed = self._packed(whole, plan.page_size, pairs, len(pairs.runs[0]))
            yield packed or whole_blocks(whole, plan.page_size, pairs.runs)
        if len(parts.fill):
            fill = parts.fill.placed(grant.address, grant.tokens)
            yield self._fill(fill, plan.page_size, pairs)

    def _fill(self, fill: Copies, page_size: int, pairs: PagePairs) -> Blocks | Packing:
        """Slices that fill the destination's row: packed, or a range a token."""
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
        if not prefer_packed(ranges * len(copies), per_page * len(pairs), self._mode):
            return None
        buffer = self._pack_buffer()
        if buffer is None or per_page > buffer.size:
            return None
        for overlap in (self._overlap, False):
            cuts = buffer.cuts(copies, page_size, len(pairs), overlap)
            needed = len(pairs.dst_runs[0]) + len(cuts) - 1  # a round ends a run
            started = len(copies) * needed if overlap else 0
            if 2 * needed <= ranges and started <= direct.STARTED:
                return Packing(copies, pairs, cuts)
        return None

    def _pack_buffer(self) -> PackBuffer | None:
        """The buffer. Asking a GPU without memory is dear: not again with every chunk."""
        if self._buffer is None and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + RETRY_S
            self._buffer = self._make_buffer()
        return self._buffer

    def _batches(
        self, ways: list[Blocks | Packing], page_size: int, ahead: Ahead
    ) -> Iterator[_Batch]:
        """Round after round through the pack buffer, and all other ranges: in one batch where all
        that is packed fits, else with the first round, or, where rounds go on by themselves,
        after all of them."""
        others = [way for way in ways if isinstance(way, Blocks)]
        packings = [way for way in ways if isinstance(way, Packing)]
        if packings and self._buffer is not None:
            rounds = self._buffer.rounds(self._rows, page_size, packings, ahead.settle)
            overlap = self._overlap
            if self._at_once(packings, page_size):
                rounds, overlap = iter([Blocks.concat(rounds)]), False
            for ranges in rounds:
                if overlap:
                    yield _Batch(ranges, ranges.bytes, wait=False)
                else:
                    yield _Batch(Blocks.concat([*others, ranges]), ranges.bytes, wait=True)
                    others = []
        if others:
            yield _Batch(Blocks.concat(others), 0, wait=True)

    def _at_once(self, packings: list[Packing], page_size: int) -> bool:
        """Whether all of it is small: one round each, and together no more than the buffer."""
        assert self._buffer is not None
        sizes = [len(p.pairs) * p.copies.bytes_per_token * page_size for p in packings]
        return all(len(p.cuts) == 1 for p in packings) and sum(sizes) <= self._buffer.size
