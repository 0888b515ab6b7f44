"""A decode rank's staging: which way slices come, and that they end where they belong.

Senders are the real ChunkWriter over an engine that applies ranges to memory; what is
expected is computed from unsharded rows.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scene import MemoryEngine

import sglang_mixkv
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.layout import Component, Kind, Shard, Spread
from sglang_mixkv.kv.plan import Copies, Plan, component_copies
from sglang_mixkv.kv.routes import Topology, routes
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter
from sglang_mixkv.protocol.extension import Grant
from sglang_mixkv.rows.host import HostRows

CANARY = 0xEE
POOL_PAGES = 40
HEADS, HEAD_BYTES = 8, (6, 10)


def load() -> ModuleType:
    """decode/landing.py by its path: its package imports SGLang, it does not."""
    name = "mixkv_staging_alone"
    if name not in sys.modules:
        path = Path(sglang_mixkv.__path__[0], "managers", "staging.py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


staging = load()


def buffer(size: int) -> PackBuffer:
    address, owner = HostRows().allocate(size)
    return PackBuffer(address, size, owner)


@dataclass
class Pool:
    """One component on one rank: [pages, page_size, heads, bytes] an entry."""

    tp: int
    rank: int
    page_size: int
    entries: list[np.ndarray] = field(default_factory=list)

    @property
    def shard(self) -> Shard:
        spread = Spread(Kind.MHA, HEADS)
        heads = len(spread.on_rank(self.tp, self.rank))
        items = tuple(self.page_size * heads * width for width in HEAD_BYTES)
        lens = tuple(item * POOL_PAGES for item in items)
        return Shard(Component(spread, items, lens), self.page_size, self.tp, self.rank)

    @property
    def ptrs(self) -> tuple[int, ...]:
        return tuple(entry.ctypes.data for entry in self.entries)

    def fill(self, whole: list[np.ndarray] | None = None) -> Pool:
        """The unsharded rows' part of this rank, or canary."""
        heads = self.shard.heads
        for index, width in enumerate(HEAD_BYTES):
            shape = (POOL_PAGES, self.page_size, len(heads), width)
            cut = np.full(shape, CANARY, np.uint8) if whole is None else whole[index][:, :, heads]
            self.entries.append(np.ascontiguousarray(cut))
        return self


class World:
    """`prefill_tp` senders and the last of `decode_tp` ranks, with head slices of two caches:
    a target that is sharded, and a drafter."""

    def __init__(
        self, prefill_tp: int, decode_tp: int, page_size: int = 4, room: int = 1 << 20,
        run: int = 1,
    ) -> None:  # fmt: skip
        self.page_size = page_size
        spread, rank = Spread(Kind.MHA, HEADS), decode_tp - 1
        self.table = routes(Topology(prefill_tp, decode_tp, spread, spread), rank)
        rng = np.random.default_rng([prefill_tp, decode_tp, page_size])
        shape = (POOL_PAGES, page_size, HEADS)
        self.truth = {
            name: [rng.integers(0, 200, (*shape, width), np.uint8) for width in HEAD_BYTES]
            for name in ("target", "draft")
        }
        self.sources = {
            name: [Pool(prefill_tp, r, page_size).fill(rows) for r in range(prefill_tp)]
            for name, rows in self.truth.items()
        }
        self.pools = {name: Pool(decode_tp, rank, page_size).fill() for name in self.truth}
        starts = rng.permutation(POOL_PAGES // run // 2) * 2 * run
        self.dst = (starts[:, None] + np.arange(run)).ravel().astype(np.int64)
        self.src = rng.permutation(POOL_PAGES)[: len(self.dst)].astype(np.int64)
        self.buffer = buffer(room) if room else None
        self.staging = staging.Staging(self.buffer, HostRows(), buffer(1 << 16))
        self.engine = MemoryEngine()
        self.slices = [
            staging.Slices(
                self.pools[name].shard,
                self.pools[name].ptrs,
                {(r.prefill_rank, r.stage): getattr(r, f"{name}_heads") for r in self.table},
                prefill_tp,
            )
            for name in ("target", "draft")
        ]

    def grant(
        self, mode: str = "auto", skip: int = 0, target: bool = True, extents: bool = True
    ) -> dict:
        slices = list(self.slices)
        if not target:
            slices[0] = staging.Slices(slices[0].shard, slices[0].ptrs, {}, 1)
        return self.staging.grant(7, *slices, self.dst, skip, mode, extents)

    def plan(self, rank: int) -> Plan:
        route = next(r for r in self.table if r.prefill_rank == rank)
        copies = []
        for name in ("target", "draft"):
            src, dst = self.sources[name][rank], self.pools[name]
            heads = getattr(route, f"{name}_heads")
            pairs = [(i, i) for i in range(len(HEAD_BYTES))]
            copies.append(component_copies(
                list(src.ptrs), src.shard, list(dst.ptrs), dst.shard, heads, pairs,
            ))  # fmt: skip
        return Plan(self.page_size, *copies, POOL_PAGES, POOL_PAGES)

    def send(self, grants: dict, mode: str = "auto", chunk: int = 7, skip: int = 0) -> None:
        """Every sender's chunks."""
        for route in self.table:
            writer = ChunkWriter(self.engine, HostRows(), lambda: buffer(4096), mode)
            plan = self.plan(route.prefill_rank)
            for start in range(0, len(self.dst), chunk):
                part = slice(start, start + chunk)
                src, dst = self.src[part], self.dst[part]
                outside = min(len(src), max(0, skip - start))
                given = Chunk(src, dst, start, outside, self.dst)
                grant = grants.get((route.prefill_rank, 0))
                assert writer.write("peer:1", plan, given, grant).code == 0

    def wrong(self, skip: int = 0) -> int:
        """Bytes that are not as they should be, untouched pages included."""
        wrong = 0
        for name, pool in self.pools.items():
            first = skip if name == "draft" else 0
            want = Pool(pool.tp, pool.rank, self.page_size).fill(self.truth[name])
            for entry, rows in zip(pool.entries, want.entries, strict=True):
                expected = np.full_like(entry, CANARY)
                expected[self.dst[first:]] = rows[self.src[first:]]
                wrong += int((expected != entry).sum())
        return wrong


@pytest.mark.parametrize("room", [1 << 20, 2000, 0])
@pytest.mark.parametrize("mode", ["auto", "packed", "direct"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("sizes", [(4, 1), (4, 2), (8, 4), (2, 2), (1, 2), (2, 8), (8, 1)])
def test_every_way_gives_the_same_bytes(
    sizes: tuple[int, int], page_size: int, mode: str, room: int
) -> None:
    for skip, run, extents in ((0, 1, True), (9, 5, True), (9, 1, False), (0, 5, False)):
        world = World(*sizes, page_size=page_size, room=room, run=run)
        world.send(world.grant(mode, skip, extents=extents), mode, skip=skip)
        world.staging.scatter(7)
        assert world.wrong(skip) == 0
        assert world.staging.problems() == []


@pytest.mark.parametrize(("page_size", "scratch"), [(1, 1 << 16), (16, 1 << 16), (16, 500)])
def test_an_extent_is_one_range_per_sender_and_entry(page_size: int, scratch: int) -> None:
    """Pages of one token, pages, and pages that are larger than the scratch memory."""
    world = World(4, 1, page_size=page_size, room=0, run=10)
    world.staging = staging.Staging(None, HostRows(), buffer(scratch))
    grants = world.grant()
    (extent,) = {grant.extent for grant in grants.values()}
    world.src = world.dst  # neighbours at the source too
    world.send(grants, chunk=100)
    tokens = len(world.dst) * page_size
    row = HEADS * max(HEAD_BYTES)
    assert extent * row <= scratch
    extents = sum(-(-10 * page_size // extent) for _ in range(len(world.dst) // 10))
    ranges = len(world.engine.ranges)
    assert ranges == 4 * 2 * len(HEAD_BYTES) * extents < 4 * 2 * len(HEAD_BYTES) * tokens / 2
    world.staging.scatter(7)
    assert world.wrong() == 0


def test_extents_that_are_single_tokens_are_not_worth_it() -> None:
    assert World(4, 2, page_size=1, room=0).grant() == {}


def kinds(grants: dict) -> set[tuple[bool, bool]]:
    """(region, by page) of what senders are told."""
    return {(bool(grant.tokens), grant.by_page) for grant in grants.values()}


def test_slices_that_are_part_of_a_row_get_a_region_and_the_target_goes_by_page() -> None:
    world = World(4, 2)
    grants = world.grant()
    assert kinds(grants) == {(True, True)}
    assert kinds(World(4, 2).grant(target=False)) == {(True, False)}
    world.send(grants)
    pool = world.pools["target"].entries[0]
    by_page = [n for _, dst, n in world.engine.ranges if 0 <= dst - pool.ctypes.data < pool.nbytes]
    assert len(by_page) == 2 * len(world.dst), "one a page and sender, of the target's K"


def test_without_room_the_draft_goes_by_page_too() -> None:
    assert kinds(World(4, 2, room=0).grant()) == {(False, True)}
    assert kinds(World(4, 2, room=2000).grant(target=False)) == {(False, True)}


def test_without_scratch_nothing_goes_by_page() -> None:
    world = World(4, 2, room=0)
    world.staging = staging.Staging(None, HostRows())
    assert world.grant() == {}


def test_senders_that_know_no_extents_write_pages() -> None:
    (page_grant, *_) = World(4, 2, room=0, run=5).grant(extents=False).values()
    assert (page_grant.by_page, page_grant.extent) == (True, 0)
    assert World(4, 2, page_size=1, room=0, run=5).grant(extents=False) == {}


@pytest.mark.parametrize(("run", "granted"), [(1, True), (10, False)])
def test_slices_that_are_whole_rows_get_a_region_where_pages_are_scattered(
    run: int, granted: bool
) -> None:
    """P < D. The target's, packed by its sender, go into the pool either way."""
    for mode in ("auto", "packed"):
        grants = World(1, 2, run=run).grant(mode)
        assert kinds(grants) == ({(True, False)} if granted else set())
    assert World(1, 2, run=run).grant("direct") == {}


def test_equal_sides_get_no_grant() -> None:
    for mode in ("auto", "packed"):
        assert World(2, 2).grant(mode) == {}


def test_a_region_has_no_rows_for_pages_outside_the_window() -> None:
    grants = World(4, 2).grant(skip=9)
    world = World(4, 2)
    assert {(g.first_page, g.tokens) for g in grants.values()} == {(9, (len(world.dst) - 9) * 4)}


def test_pages_outside_the_region_are_refused() -> None:
    world = World(4, 2)
    (grant, *_) = world.grant().values()
    for wrong in (
        Grant(grant.address, grant.tokens, first_page=1),
        Grant(grant.address, grant.tokens - 4),
    ):
        with pytest.raises(MixKVError, match="nothing of this chunk was sent"):
            world.send(dict.fromkeys([(2, 0), (3, 0)], wrong), chunk=100)
    assert world.engine.ranges == []


def test_a_room_that_failed_leaves_its_region_in_quarantine() -> None:
    world = World(4, 2)
    world.grant()
    held, _ = world.staging.in_use()
    world.staging.release(7)
    assert world.staging.in_use() == (0, held)
    world.staging.scatter(7)
    assert {entry.max() for entry in world.pools["draft"].entries} == {CANARY}


def test_a_room_without_a_region_leaves_nothing() -> None:
    world = World(4, 2, room=0)
    world.grant()
    assert world.staging.problems(), "the grant is noticed"
    world.staging.release(7)
    assert world.staging.problems() == []


def test_by_page_needs_slices_that_fill_their_senders_rows() -> None:
    world = World(4, 1, room=0)
    assert kinds(world.grant()) == {(False, True)}
    part = world.slices[0]
    world.slices[0] = staging.Slices(part.shard, part.ptrs, {(0, 0): range(2), (1, 0): range(2)}, 2)
    assert world.grant() == {}


def test_a_drained_region_is_free_at_once() -> None:
    """When all ranks that were contacted have said so, in this quarantine and not in another."""
    world = World(4, 2)
    world.grant()
    held, _ = world.staging.in_use()
    world.staging.release(7, frozenset({2, 3}))
    world.staging.drained(7, {2})
    assert world.staging.in_use() == (0, held)
    world.staging.drained(7, {2, 3, 9})
    assert world.staging.in_use() == (0, 0)
    world.grant()
    world.staging.drained(7, {2, 3})
    assert world.staging.in_use() == (held, 0), "the next request of that number"
    world.staging.release(7)
    world.staging.drained(7, {2, 3})
    assert world.staging.in_use() == (0, held), "nobody said whose word counts"


def test_the_buffer_comes_with_the_first_peer_that_needs_it() -> None:
    class Engine(MemoryEngine):
        def batch_register(self, *_: object) -> int:
            return 0

    world = World(4, 2)
    target, draft = world.slices
    none = staging.Slices(draft.shard, draft.ptrs, {}, 1)
    first = staging.prepare(Engine(), HostRows(), 4096, target, none, "auto")
    assert first.span == (0, 0)
    again = staging.prepare(Engine(), HostRows(), 4096, target, draft, "auto", before=first)
    assert again is first
    assert first.span[1] == 4096


def test_memory_is_taken_only_where_a_peer_can_need_it() -> None:
    class Engine(MemoryEngine):
        def batch_register(self, addresses: list[int], lengths: list[int]) -> int:
            registered.append(lengths[0])
            return 0

    for sizes, mode, wanted in (
        ((4, 2), "auto", [4096]),
        ((1, 2), "auto", [4096]),
        ((2, 2), "auto", None),
        ((4, 2), "direct", None),
    ):
        registered: list[int] = []
        found = staging.prepare(Engine(), HostRows(), 4096, *World(*sizes).slices, mode)
        assert (found is None) is (wanted is None)
        assert registered == (wanted or [])


def test_copies_by_shape() -> None:
    ints = [np.array(v, np.int64) for v in ([1, 2, 3], [4, 5, 6], [8, 8, 8], [8, 4, 16])]
    copies = Copies(*ints, np.zeros(3, np.int64), np.zeros(3, np.int64), np.array([8, 4, 8]))
    parts = copies.parts
    assert [part.src.tolist() for part in (parts.whole, parts.fill, parts.part)] == [[1], [2], [3]]
