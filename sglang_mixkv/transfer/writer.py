"""One transfer thread's hands: from a plan and a chunk's pages to bytes at the peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sglang_mixkv.core.plan import Blocks, Copies, Ints, Plan, blocks, page_runs
from sglang_mixkv.transfer import direct
from sglang_mixkv.transfer.packed import PackBuffer, into_region, prefer_packed
from sglang_mixkv.transfer.rows import Rows


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


@dataclass(frozen=True)
class Region:
    """Where the draft slices of this sender go instead of the pool: `tokens` rows an entry."""

    address: int
    tokens: int


@dataclass(frozen=True)
class Written:
    """What became of a chunk: the transport's code, and bytes handed to it by component."""

    code: int
    target_bytes: int
    draft_bytes: int
    descriptors: int
    packed_bytes: int


@dataclass(frozen=True)
class _Job:
    copies: Copies
    src_pages: Ints
    dst_pages: Ints
    packed: bool


class ChunkWriter:
    """Writes chunks for one thread, packing through `buffer` (made at the first need)."""

    def __init__(
        self,
        engine: direct.Engine,
        rows: Rows,
        make_buffer: Callable[[], PackBuffer | None],
        mode: str,
    ) -> None:
        self._engine, self._rows, self._mode = engine, rows, mode
        self._make_buffer = make_buffer
        self._buffer: PackBuffer | None = None

    def write(self, session: str, plan: Plan, chunk: Chunk, region: Region | None) -> Written:
        """Write one chunk, target and draft, as few batches as the pack buffer allows."""
        jobs = [
            *self._split(plan.target, plan.page_size, chunk.src_pages, chunk.dst_pages),
            *self._split(*self._draft(plan, chunk, region)),
        ]
        per_page = plan.page_size
        pending = Blocks.concat(
            blocks(j.copies, per_page, j.src_pages, j.dst_pages) for j in jobs if not j.packed
        )
        code, descriptors, packed_bytes = 0, 0, 0
        for ranges in self._rounds(jobs, per_page):
            packed_bytes += ranges.bytes
            pending = Blocks.concat([pending, ranges])
            code, descriptors = self._flush(session, pending, descriptors)
            pending = Blocks.concat([])
            if code:
                break
        if not code:
            code, descriptors = self._flush(session, pending, descriptors)
        sent = (chunk.skip, len(chunk.src_pages) - chunk.skip)
        return Written(
            code,
            len(chunk.src_pages) * plan.target_bytes_per_page,
            max(0, sent[1]) * plan.draft_bytes_per_page,
            descriptors,
            packed_bytes,
        )

    def _flush(self, session: str, ranges: Blocks, so_far: int) -> tuple[int, int]:
        return direct.write(self._engine, session, ranges), so_far + len(ranges.length)

    @staticmethod
    def _draft(plan: Plan, chunk: Chunk, region: Region | None) -> tuple[Copies, int, Ints, Ints]:
        src, dst = chunk.src_pages[chunk.skip :], chunk.dst_pages[chunk.skip :]
        if region is None:
            return plan.draft, plan.page_size, src, dst
        first = chunk.start + chunk.skip
        pages = np.arange(first, first + len(src), dtype=np.int64)
        return into_region(plan.draft, region.address, region.tokens), plan.page_size, src, pages

    def _split(
        self, copies: Copies, page_size: int, src_pages: Ints, dst_pages: Ints
    ) -> Iterator[_Job]:
        """The copies that are packed, and those that are not."""
        if not len(copies) or not len(src_pages):
            return
        for whole in (True, False):
            part = copies.select(copies.whole == whole)
            packable = part.dst_row == part.width
            for packed in (True, False):
                job = part.select(packable == packed)
                if len(job):
                    worth = packed and self._worth(job, page_size, src_pages, dst_pages)
                    yield _Job(job, src_pages, dst_pages, worth)

    def _worth(self, copies: Copies, page_size: int, src_pages: Ints, dst_pages: Ints) -> bool:
        """Whether packing these is right by the rule, leaves fewer ranges, and can be done."""
        whole = bool(copies.whole.all())
        tokens = len(src_pages) * page_size
        runs = len(page_runs(src_pages, dst_pages)[0]) if whole else tokens
        packed_runs = len(page_runs(np.arange(len(dst_pages)), dst_pages)[0])
        per_page = int(copies.width.sum()) * page_size
        total = per_page * len(src_pages)
        if 2 * packed_runs > runs or not prefer_packed(runs * len(copies), total, self._mode):
            return False
        self._buffer = self._buffer or self._make_buffer()
        if self._buffer is None or per_page > self._buffer.size:
            return False
        rounds = -(-len(src_pages) // (self._buffer.size // per_page))
        return 2 * (packed_runs + rounds - 1) <= runs  # a round ends a run

    def _rounds(self, jobs: list[_Job], page_size: int) -> Iterator[Blocks]:
        for job in jobs:
            if job.packed and self._buffer is not None:
                yield from self._buffer.rounds(
                    self._rows, job.copies, page_size, job.src_pages, job.dst_pages
                )
