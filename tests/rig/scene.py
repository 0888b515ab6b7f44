"""What tests of the writer share: an engine over this process's memory, and senders and
receivers whose every byte is known."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st

from sglang_mixkv.kv.plan import Copies, Plan, Reach, from_region
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter, Written
from sglang_mixkv.protocol.extension import Grant
from sglang_mixkv.rows.host import HostRows
from sglang_mixkv.rows.slices import scatter
from sglang_mixkv.transport.base import Transport
from sglang_mixkv.transport.mooncake import Engines, InFlight, Mooncake

POOL_PAGES = 12
CANARY = 0xEE


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(0, 256, shape, np.uint8)


class MemoryEngine:
    """SGLang's MooncakeTransferEngine, as far as it writes; ranges land at once.

    `fail_at`: number of the call (from 0) that returns `code` and moves nothing.
    """

    def __init__(self, fail_at: int = -1, code: int = -1) -> None:
        self.calls: list[list[tuple[int, int, int]]] = []
        self.fail_at, self.code = fail_at, code

    def batch_transfer_sync(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int:  # fmt: skip
        assert session_id == "peer:1"
        for values in (buffers, peer_buffer_addresses, lengths):
            assert isinstance(values, list)
            assert all(type(value) is int for value in values)
        ranges = list(zip(buffers, peer_buffer_addresses, lengths, strict=True))
        self.calls.append(ranges)
        if len(self.calls) - 1 == self.fail_at:
            return self.code
        for src, dst, length in ranges:
            assert length > 0
            ctypes.memmove(dst, src, length)
        return 0

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        return 0

    def send_probe(self, session: str) -> int:
        """The peer is away: then a failure does not replace the engine."""
        return -1

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        return [one for call in self.calls for one in call]

    def written(self) -> list[tuple[int, int]]:
        """(first, end) of every range at the destination, in the order of addresses."""
        return sorted((dst, dst + length) for _, dst, length in self.ranges)


def over(engine: MemoryEngine, in_flight: InFlight | None = None) -> Mooncake:
    """The transport over this engine, which is not replaced. `in_flight`: as over TCP; without
    as over RDMA."""
    return Mooncake(Engines(engine, lambda: pytest.fail("replaced")), in_flight)


# ---------------------------------------------------------------- scenes


@dataclass
class Scene:
    """A sender of `src_heads` heads, a receiver of `dst_heads`, and `heads` that both hold.

    `region`: slices go to a region and are scattered. `skips`: pages outside the window, of one
    window after the other; entries have them in turns. `most_pages`: so many of a chunk at a time;
    0: all.
    """

    head_bytes: list[int]  # per draft entry
    src_heads: int
    dst_heads: int
    src_first: int
    dst_first: int
    heads: int
    page_size: int
    src_pages: np.ndarray
    dst_pages: np.ndarray
    skips: tuple[int, ...] = (0,)
    region: bool = False
    buffer_pages: float = 1.0  # size of the pack buffer, in pages of all entries
    target_row: int = 12
    chunk_pages: int = POOL_PAGES
    most_pages: int = 0

    def __post_init__(self) -> None:
        tokens = POOL_PAGES * self.page_size
        self.target_src = noise(tokens, self.target_row, seed=1)
        self.draft_src = [noise(tokens, self.src_heads, b, seed=2) for b in self.head_bytes]
        self.clear()

    def clear(self) -> None:
        tokens = POOL_PAGES * self.page_size
        self.target_dst = np.full((tokens, self.target_row), CANARY, np.uint8)
        self.draft_dst = [
            np.full((tokens, self.dst_heads, b), CANARY, np.uint8) for b in self.head_bytes
        ]
        rows = len(self.src_pages) * self.page_size
        self.area = np.full(sum(self.widths) * rows + 64, CANARY, np.uint8)

    @property
    def widths(self) -> list[int]:
        return [self.heads * b for b in self.head_bytes]

    def skip(self, entry: int) -> int:
        """That of a draft entry."""
        return self.skips[entry % len(self.skips)]

    def draft(self) -> Copies:
        """All entries of it."""
        byte = np.array(self.head_bytes, np.int64)
        return Copies(
            src=ints(*(e.ctypes.data for e in self.draft_src)),
            dst=ints(*(e.ctypes.data for e in self.draft_dst)),
            src_row=byte * self.src_heads,
            dst_row=byte * self.dst_heads,
            src_offset=byte * self.src_first,
            dst_offset=byte * self.dst_first,
            width=byte * self.heads,
        )

    def plan(self) -> Plan:
        of_window = np.arange(len(self.head_bytes)) % len(self.skips)
        draft = tuple(
            Reach(number, self.draft().select(of_window == number))
            for number in range(len(self.skips))
        )
        row, zero = ints(self.target_row), ints(0)
        target = Copies(
            ints(self.target_src.ctypes.data), ints(self.target_dst.ctypes.data),
            row, row, zero, zero, row,
        )  # fmt: skip
        return Plan(self.page_size, target, draft, POOL_PAGES, POOL_PAGES)

    def rows_of(self, pages: np.ndarray) -> list[int]:
        return [int(p) * self.page_size + s for p in pages for s in range(self.page_size)]

    def expected(self) -> list[bytes]:
        """Bytes of the receiver's target and draft entries after all chunks."""
        target = np.full_like(self.target_dst, CANARY)
        draft = [np.full_like(entry, CANARY) for entry in self.draft_dst]
        pairs = list(zip(self.rows_of(self.src_pages), self.rows_of(self.dst_pages), strict=True))
        for src, dst in pairs:
            target[dst] = self.target_src[src]
        for entry, (want, have) in enumerate(zip(draft, self.draft_src, strict=True)):
            for src, dst in pairs[self.skip(entry) * self.page_size :]:
                for head in range(self.heads):
                    want[dst, self.dst_first + head] = have[src, self.src_first + head]
        return [target.tobytes(), *(entry.tobytes() for entry in draft)]

    def found(self) -> list[bytes]:
        return [self.target_dst.tobytes(), *(entry.tobytes() for entry in self.draft_dst)]

    def pack_buffer(self) -> PackBuffer:
        size = int(self.buffer_pages * sum(self.widths) * self.page_size)
        memory = HostRows().allocate(size)
        return PackBuffer(memory.address, size, memory.owner)

    def send(self, mode: str, transport: Transport) -> list[Written]:
        """All chunks through one writer, then the scatter, from a clean receiver."""
        self.clear()
        first = min(self.skips)
        tokens = (len(self.src_pages) - first) * self.page_size
        grant = Grant(self.area.ctypes.data, tokens, first) if self.region else None
        writer = ChunkWriter(transport, HostRows(), self.pack_buffer, mode, self.most_pages)
        written, plan = [], self.plan()
        for start in range(0, max(1, len(self.src_pages)), self.chunk_pages):
            part = slice(start, start + self.chunk_pages)
            src, dst = self.src_pages[part], self.dst_pages[part]
            chunk = Chunk(src, dst, start, self.skips)
            written.append(writer.write("peer:1", plan, chunk, grant))
        if self.region:
            self._scatter(plan)
        return written

    def _scatter(self, plan: Plan) -> None:
        address = self.area.ctypes.data
        for reach, skip in zip(plan.draft, self.skips, strict=True):
            pages = self.dst_pages[skip:]
            tokens = len(pages) * self.page_size
            back = from_region(reach.copies, address, tokens)
            scatter(HostRows(), back, self.page_size, 0, pages)
            address += tokens * reach.copies.bytes_per_token

    def bytes(self) -> tuple[int, int]:
        """Bytes that have to be sent, target and draft."""
        tokens = len(self.src_pages) * self.page_size
        drafts = ((tokens - self.skip(i) * self.page_size) * w for i, w in enumerate(self.widths))
        return tokens * self.target_row, sum(drafts)


@st.composite
def page_lists(draw: st.DrawFn, count: int) -> np.ndarray:
    """Random pages, or a run."""
    first = draw(st.integers(0, POOL_PAGES - count))
    run = st.just(list(range(first, first + count)))
    pages = draw(run | st.permutations(range(POOL_PAGES)).map(lambda p: p[:count]))
    return ints(*pages)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    heads = draw(st.integers(1, 3))
    src_first, dst_first = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    src_heads = src_first + heads + draw(st.integers(0, 2))
    dst_heads = dst_first + heads + draw(st.integers(0, 2))
    count = draw(st.integers(0, POOL_PAGES))
    return Scene(
        head_bytes=draw(st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=3)),
        src_heads=src_heads, dst_heads=dst_heads, src_first=src_first, dst_first=dst_first,
        heads=heads, page_size=draw(st.sampled_from([1, 2, 4])),
        src_pages=draw(page_lists(count)), dst_pages=draw(page_lists(count)),
        skips=tuple(draw(st.lists(st.integers(0, count), min_size=1, max_size=3))),
        region=draw(st.booleans()),
        buffer_pages=draw(st.sampled_from([0.5, 1.0, 2.5, 100.0])),
        chunk_pages=draw(st.sampled_from([1, 3, POOL_PAGES])),
        most_pages=draw(st.sampled_from([0, 1, 5])),
    )  # fmt: skip


def a_scene(**changes: object) -> Scene:
    """P < D over one run: a slice of one head of four is the receiver's whole row."""
    run = np.arange(10, dtype=np.int64)
    values = {
        "head_bytes": [8, 4], "src_heads": 4, "dst_heads": 1, "src_first": 2, "dst_first": 0,
        "heads": 1, "page_size": 4, "src_pages": run, "dst_pages": run + 2, "buffer_pages": 100.0,
    }  # fmt: skip
    return Scene(**{**values, **changes})
