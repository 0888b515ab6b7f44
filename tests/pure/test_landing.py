"""A decode rank's landing area: which way slices come, and that they end where they belong.

Senders are the real ChunkWriter over an engine that applies ranges to memory; what is
expected is computed from unsharded rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rig.scene import CANARY, MemoryEngine, over

from sglang_mixkv.config import Config
from sglang_mixkv.decode import landing as module
from sglang_mixkv.decode.landing import SCRATCH, Landing
from sglang_mixkv.decode.regions import ALIGNMENT, RegionAllocator
from sglang_mixkv.decode.slices import Slices
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.layout import Component, Kind, Shard, Spread
from sglang_mixkv.kv.plan import Copies, Plan, Reach, component_copies
from sglang_mixkv.kv.routes import Topology, routes
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter
from sglang_mixkv.protocol.extension import Grant
from sglang_mixkv.rows.host import Buffer, HostRows
from sglang_mixkv.stats import Stats

POOL_PAGES = 40
HEADS, HEAD_BYTES = 8, (6, 10)
REGIONS = Config().staging_mb << 20


class Memory(HostRows):
    """Rows with `room` bytes for regions, and `scratch` bytes; `error` where that is 0.

    `asked`: sizes of what was asked for.
    """

    error: Exception = MemoryError("none left")

    def __init__(self, room: int, scratch: int) -> None:
        self.room, self.scratch = room, scratch
        self.asked: list[int] = []

    def allocate(self, size: int) -> Buffer:
        self.asked.append(size)
        given = self.scratch if size == SCRATCH else self.room
        if not given:
            raise self.error
        return super().allocate(given)


def pack_buffer() -> PackBuffer:
    memory = HostRows().allocate(4096)
    return PackBuffer(memory.address, memory.size, memory.owner)


@dataclass
class Pool:
    """One component on one rank: [pages, page_size, heads, bytes] an entry."""

    tp: int
    rank: int
    page_size: int
    entries: list[np.ndarray] = field(default_factory=list)
    windows: tuple[int, ...] = ()

    @property
    def shard(self) -> Shard:
        spread = Spread(Kind.MHA, HEADS)
        heads = len(spread.on_rank(self.tp, self.rank))
        items = tuple(self.page_size * heads * width for width in HEAD_BYTES)
        lens = tuple(item * POOL_PAGES for item in items)
        component = Component(spread, items, lens, self.windows)
        return Shard(component, self.page_size, self.tp, self.rank)

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
    a target that is sharded, and a drafter. `skips`: pages before the window of its K and its V."""

    def __init__(
        self, prefill_tp: int, decode_tp: int, page_size: int = 4, room: int = 1 << 20,
        run: int = 1, mode: str = "auto", scratch: int = 1 << 16, skips: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        self.page_size, self.mode, self.skips = page_size, mode, skips
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
        total = POOL_PAGES // run // 2 * run
        self.pools["draft"].windows = tuple(
            (total - 1 - skip) * page_size - 1 if skip else 0 for skip in skips
        )
        starts = rng.permutation(POOL_PAGES // run // 2) * 2 * run
        self.dst = (starts[:, None] + np.arange(run)).ravel().astype(np.int64)
        self.src = rng.permutation(POOL_PAGES)[: len(self.dst)].astype(np.int64)
        self.engine, self.memory = MemoryEngine(), Memory(room, scratch)
        config = msgspec.structs.replace(Config(), draft_transfer=mode)
        self.landing = Landing(self.memory, config, Stats("decode"))
        self.landing.connect(over(self.engine))
        self.target, draft = (
            Slices(
                self.pools[name].shard,
                self.pools[name].ptrs,
                {(r.prefill_rank, r.stage): getattr(r, f"{name}_heads") for r in self.table},
                prefill_tp,
            )
            for name in ("target", "draft")
        )
        self.draft = draft.by_window

    def grant(
        self, target: bool = True, extents: bool = True, told: tuple[int, int] | None = None
    ) -> dict:
        """What senders are told, once the first peer's registration has come."""
        slices = self.target if target else without_senders(self.target)
        self.landing.prepare(slices, self.draft)
        return self.landing.grant(
            7, slices, self.draft, self.dst,
            told=self.landing.span if told is None else told, knows_extents=extents,
        )  # fmt: skip

    def plan(self, rank: int) -> Plan:
        route = next(r for r in self.table if r.prefill_rank == rank)
        target, draft = (
            tuple(
                Reach(window, component_copies(
                    list(src.ptrs), src.shard, list(dst.ptrs), dst.shard,
                    getattr(route, f"{name}_heads"), [(i, i) for i in entries],
                ))
                for window, entries in dst.shard.component.by_window.items()
            )
            for name, dst in self.pools.items()
            for src in [self.sources[name][rank]]
        )  # fmt: skip
        return Plan(self.page_size, target[0].copies, draft, POOL_PAGES, POOL_PAGES)

    def send(self, grants: dict, chunk: int = 7) -> None:
        """Every sender's chunks."""
        for route in self.table:
            writer = ChunkWriter(over(self.engine), HostRows(), pack_buffer, self.mode)
            plan = self.plan(route.prefill_rank)
            for start in range(0, len(self.dst), chunk):
                part = slice(start, start + chunk)
                src, dst = self.src[part], self.dst[part]
                given = Chunk(src, dst, start, plan.firsts(len(self.dst)), self.dst)
                grant = grants.get((route.prefill_rank, 0))
                assert writer.write("peer:1", plan, given, grant).code == 0

    def wrong(self) -> int:
        """Bytes that are not as they should be, untouched pages included."""
        wrong = 0
        for name, pool in self.pools.items():
            want = Pool(pool.tp, pool.rank, self.page_size).fill(self.truth[name])
            skips = self.skips if name == "draft" else (0, 0)
            for first, entry, rows in zip(skips, pool.entries, want.entries, strict=True):
                expected = np.full_like(entry, CANARY)
                expected[self.dst[first:]] = rows[self.src[first:]]
                wrong += int((expected != entry).sum())
        return wrong


def without_senders(slices: Slices) -> Slices:
    return Slices(slices.shard, slices.ptrs, {}, 1)


@pytest.mark.parametrize("room", [1 << 20, 2000, 0])
@pytest.mark.parametrize("mode", ["auto", "packed", "direct"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("sizes", [(4, 1), (4, 2), (8, 4), (2, 2), (1, 2), (2, 8), (8, 1)])
def test_every_way_gives_the_same_bytes(
    sizes: tuple[int, int], page_size: int, mode: str, room: int
) -> None:
    for skips, run, extents in (
        ((0, 0), 1, True), ((9, 9), 5, True), ((9, 9), 1, False), ((0, 0), 5, False),
        ((9, 0), 1, True), ((3, 12), 5, True), ((0, 9), 5, False),
    ):  # fmt: skip
        world = World(*sizes, page_size=page_size, room=room, run=run, mode=mode, skips=skips)
        world.send(world.grant(extents=extents))
        world.landing.scatter(7)
        assert world.wrong() == 0
        assert world.landing.problems() == []


@pytest.mark.parametrize(("page_size", "scratch"), [(1, 1 << 16), (16, 1 << 16), (16, 500)])
def test_an_extent_is_one_range_per_sender_and_entry(page_size: int, scratch: int) -> None:
    """Pages of one token, pages, and pages that are larger than the scratch memory."""
    world = World(4, 1, page_size=page_size, room=0, run=10, scratch=scratch)
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
    world.landing.scatter(7)
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
    assert len(by_page) == 2 * len(world.dst), "one per page and sender, of the target's K"


def test_without_room_the_draft_goes_by_page_too() -> None:
    assert kinds(World(4, 2, room=0).grant()) == {(False, True)}
    assert kinds(World(4, 2, room=2000).grant(target=False)) == {(False, True)}


def test_senders_that_registered_before_the_buffer_came_get_no_region() -> None:
    """A request of another server had it made since: they would reject the region."""
    assert kinds(World(4, 2).grant(target=False, told=(0, 0))) == {(False, True)}


def test_without_scratch_nothing_goes_by_page() -> None:
    assert World(4, 2, room=0, scratch=0).grant() == {}


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
        grants = World(1, 2, run=run, mode=mode).grant()
        assert kinds(grants) == ({(True, False)} if granted else set())
    assert World(1, 2, run=run, mode="direct").grant() == {}


def test_equal_sides_get_no_grant() -> None:
    for mode in ("auto", "packed"):
        assert World(2, 2, mode=mode).grant() == {}


def test_a_region_has_no_rows_for_pages_outside_the_window() -> None:
    for skips, rows in (((9, 9), (11, 11)), ((9, 0), (11, 20)), ((3, 12), (17, 8))):
        world = World(4, 2, skips=skips)
        grants = world.grant()
        told = {(g.first_page, g.tokens) for g in grants.values()}
        assert told == {(min(skips), max(rows) * 4)}
        bytes_here = 4 * sum(map(prod, zip(HEAD_BYTES, rows, strict=True)))  # of 4 tokens, a head
        (first, second) = sorted(grant.address for grant in grants.values())
        assert second - first == 2 * bytes_here, "two heads of a sender"
        held, _ = world.landing.in_use()
        assert held == -(-4 * bytes_here // ALIGNMENT) * ALIGNMENT


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
    held, _ = world.landing.in_use()
    world.landing.release(7)
    assert world.landing.in_use() == (0, held)
    world.landing.scatter(7)
    assert {entry.max() for entry in world.pools["draft"].entries} == {CANARY}


def test_a_room_without_a_region_leaves_nothing() -> None:
    world = World(4, 2, room=0)
    world.grant()
    assert world.landing.problems(), "the grant is noticed"
    world.landing.release(7)
    assert world.landing.problems() == []


def test_by_page_needs_slices_that_fill_their_senders_rows() -> None:
    world = World(4, 1, room=0)
    assert kinds(world.grant()) == {(False, True)}
    part = world.target
    world.target = Slices(part.shard, part.ptrs, {(0, 0): range(2), (1, 0): range(2)}, 2)
    assert world.grant() == {}


def test_a_grant_that_fails_leaves_no_region() -> None:
    world = World(4, 2)
    with mock.patch.object(module, "_areas", side_effect=MemoryError), pytest.raises(MemoryError):
        world.grant()
    assert world.landing.problems() == []


def test_a_drained_region_is_free_at_once() -> None:
    """When all ranks that were contacted have said so, in this quarantine and not in another."""
    world = World(4, 2)
    world.grant()
    held, _ = world.landing.in_use()
    world.landing.release(7, frozenset({2, 3}))
    world.landing.drained(7, {2})
    assert world.landing.in_use() == (0, held)
    world.landing.drained(7, {2, 3, 9})
    assert world.landing.in_use() == (0, 0)
    world.grant()
    world.landing.drained(7, {2, 3})
    assert world.landing.in_use() == (held, 0), "the next request of that number"
    world.landing.release(7)
    world.landing.drained(7, {2, 3})
    assert world.landing.in_use() == (0, held), "nobody said whose word counts"


def test_a_quarantine_does_not_end_by_what_is_said_of_the_next_request() -> None:
    """Of the same number, to which no region was granted; the ranks are the same."""
    world = World(4, 2)
    world.grant()
    held, _ = world.landing.in_use()
    world.landing.release(7, frozenset({2, 3}))
    world.landing.begin(7)
    world.landing.release(7, frozenset({2, 3}))
    world.landing.drained(7, {2, 3})
    assert world.landing.in_use() == (0, held)


def test_the_buffer_comes_with_the_first_peer_that_needs_it() -> None:
    world = World(4, 2)
    target, draft = world.target, world.draft
    nothing = tuple(map(without_senders, draft))
    world.landing.prepare(target, ())
    world.landing.prepare(without_senders(target), nothing)
    assert (world.memory.asked, world.landing.span) == ([], (0, 0))
    world.landing.prepare(target, nothing)
    assert world.memory.asked == [SCRATCH], "the target's slices need no regions"
    for _ in range(2):
        world.landing.prepare(target, draft)
    assert (world.memory.asked, world.landing.span[1]) == ([SCRATCH, REGIONS], 1 << 20)


@pytest.mark.parametrize(
    ("sizes", "mode", "asked"),
    [
        ((4, 2), "auto", [SCRATCH, REGIONS]),
        ((1, 2), "auto", [SCRATCH, REGIONS]),
        ((2, 2), "auto", []),
        ((4, 2), "direct", []),
    ],
)
def test_memory_is_taken_only_where_a_peer_can_need_it(
    sizes: tuple[int, int], mode: str, asked: list[int]
) -> None:
    world = World(*sizes, mode=mode)
    world.landing.prepare(world.target, world.draft)
    assert world.memory.asked == asked


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("the pool's own")])
def test_memory_that_could_not_be_had_is_asked_for_once_a_minute(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    world = World(4, 2, room=0)
    world.memory.error = error
    for _ in range(3):
        world.landing.prepare(world.target, world.draft)
    assert (world.memory.asked, caplog.text.count("no staging buffer")) == ([SCRATCH, REGIONS], 1)
    now[0] += module.RETRY_S
    world.memory.room = 4096
    world.landing.prepare(world.target, world.draft)
    assert (world.memory.asked[2:], world.landing.span[1]) == ([REGIONS], 4096)


def test_memory_that_cannot_be_registered_is_not_used() -> None:
    world = World(4, 2)
    world.engine.batch_register = lambda *_: -1  # type: ignore[method-assign]
    assert kinds(world.grant()) == {(False, True)}
    assert world.landing.span == (0, 0)


def test_copies_by_shape() -> None:
    ints = [np.array(v, np.int64) for v in ([1, 2, 3], [4, 5, 6], [8, 8, 8], [8, 4, 16])]
    copies = Copies(*ints, np.zeros(3, np.int64), np.zeros(3, np.int64), np.array([8, 4, 8]))
    parts = copies.parts
    assert [part.src.tolist() for part in (parts.whole, parts.fill, parts.part)] == [[1], [2], [3]]


# ---------------------------------------------------------------- regions


class Regions(RuleBasedStateMachine):
    """RegionAllocator against a list of who holds which bytes until when."""

    SIZE = 16 * ALIGNMENT

    def __init__(self) -> None:
        super().__init__()
        self.regions = RegionAllocator(self.SIZE)
        self.now = 0.0
        self.held: dict[int, int] = {}  # start -> end
        self.retired: dict[int, tuple[int, float]] = {}  # start -> (end, until)

    def taken(self) -> list[tuple[int, int]]:
        quarantined = [(s, e) for s, (e, until) in self.retired.items() if until > self.now]
        return sorted([*self.held.items(), *quarantined])

    def largest_gap(self) -> int:
        edges = [(0, 0), *self.taken(), (self.SIZE, self.SIZE)]
        return max(b[0] - a[1] for a, b in pairwise(edges))

    @rule(length=st.integers(0, 5 * ALIGNMENT))
    def allocate(self, length: int) -> None:
        size = max(1, -(-length // ALIGNMENT)) * ALIGNMENT
        start = self.regions.allocate(length, self.now)
        if start is None:
            assert self.largest_gap() < size, "there was room"
            return
        assert all(start + size <= s or e <= start for s, e in self.taken()), "in use"
        assert 0 <= start <= self.SIZE - size
        self.retired = {s: v for s, v in self.retired.items() if v[1] > self.now}
        self.held[start] = start + size

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.held)))
        self.regions.free(start)
        del self.held[start]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seconds=st.integers(0, 5))
    def retire(self, data: st.DataObject, seconds: int) -> None:
        start = data.draw(st.sampled_from(sorted(self.held)))
        self.regions.retire(start, self.now + seconds)
        self.retired[start] = (self.held.pop(start), self.now + seconds)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def books_agree(self) -> None:
        assert self.regions.problems() == []
        held, retired = self.regions.in_use()
        assert held == sum(end - start for start, end in self.held.items())
        assert retired == sum(end - start for start, (end, _) in self.retired.items()) or (
            retired >= sum(e - s for s, (e, until) in self.retired.items() if until > self.now)
        )


TestRegions = Regions.TestCase
TestRegions.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_quarantined_region_comes_back_when_its_time_is_over() -> None:
    regions = RegionAllocator(2 * ALIGNMENT)
    first = regions.allocate(2 * ALIGNMENT, 0.0)
    assert first == 0
    regions.retire(first, until=60.0)
    assert regions.in_use() == (0, 2 * ALIGNMENT)
    assert regions.allocate(1, 59.9) is None
    assert regions.allocate(1, 60.0) == 0
    assert regions.in_use() == (ALIGNMENT, 0)


def test_a_region_ends_once() -> None:
    regions = RegionAllocator(4 * ALIGNMENT)
    one, other = regions.allocate(1, 0.0), regions.allocate(1, 0.0)
    assert one is not None
    assert other is not None
    regions.free(one)
    regions.retire(other, 5.0)
    for call in (regions.free, lambda start: regions.retire(start, 9.0)):
        for start in (one, other):
            with pytest.raises(KeyError):
                call(start)


def test_a_region_larger_than_the_buffer_is_refused() -> None:
    assert RegionAllocator(4 * ALIGNMENT).allocate(4 * ALIGNMENT + 1, 0.0) is None


def test_broken_books_are_noticed() -> None:
    regions = RegionAllocator(4 * ALIGNMENT)
    regions.allocate(2 * ALIGNMENT, 0.0)
    regions._held[ALIGNMENT] = 4 * ALIGNMENT
    regions._retired[3 * ALIGNMENT] = 1.0
    assert regions.problems() == [
        "1 regions given and 0 ended, but 2 are in use",
        "the region at 0 of 8192 bytes reaches past 4096",
        "the region at 4096 of 16384 bytes reaches past 16384",
        "regions at [12288] are in quarantine, but not in use",
    ]
