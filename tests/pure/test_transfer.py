"""transfer/: rows, packing, writing and regions, byte by byte in this process's memory.

The engine here applies the ranges it is given to memory, so a wrong address shows as wrong
bytes. What is expected is computed with plain loops over (page, slot, head).
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scene import CANARY, POOL_PAGES, MemoryEngine, Scene, a_scene, ints, noise, scenes

from sglang_mixkv.decode.regions import ALIGNMENT, RegionAllocator
from sglang_mixkv.kv.ranges import page_runs
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter, Written
from sglang_mixkv.rows.host import HostRows, RowCopy
from sglang_mixkv.transport.base import (
    DIRECT_DESCRIPTORS,
    DIRECT_MEAN,
    MAX_DESCRIPTORS,
    prefer_packed,
)

# ---------------------------------------------------------------- rows


@dataclass
class RowCase:
    """Entries of (width, source stride, destination stride), and row numbers."""

    entries: list[tuple[int, int, int]]
    src_rows: list[int]
    dst_rows: list[int]
    rows: int = 16
    sources: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, (_, src_stride, dst_stride) in enumerate(self.entries):
            self.sources.append(noise(self.rows * src_stride, seed=number))
            self.targets.append(np.full(self.rows * dst_stride, CANARY, np.uint8))

    def what(self) -> RowCopy:
        columns = np.array(self.entries, np.int64).T
        return RowCopy(
            ints(*(s.ctypes.data for s in self.sources)),
            ints(*(t.ctypes.data for t in self.targets)),
            *(columns[1], columns[2], columns[0]),
            *(ints(*self.src_rows), ints(*self.dst_rows)),
        )

    def expected(self) -> list[bytes]:
        wanted = []
        for (width, src_stride, dst_stride), source, target in zip(
            self.entries, self.sources, self.targets, strict=True
        ):
            out = bytearray(target.tobytes())
            for src, dst in zip(self.src_rows, self.dst_rows, strict=True):
                row = source[src * src_stride : src * src_stride + width]
                out[dst * dst_stride : dst * dst_stride + width] = row.tobytes()
            wanted.append(bytes(out))
        return wanted


widths = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 40])


@st.composite
def row_cases(draw: st.DrawFn) -> RowCase:
    gaps = st.sampled_from([0, 1, 4, 8, 24])
    entries = [
        (width, width + draw(gaps), width + draw(gaps))
        for width in draw(st.lists(widths, min_size=1, max_size=3))
    ]
    count = draw(st.integers(0, 16))
    src_rows = draw(st.lists(st.integers(0, 15), min_size=count, max_size=count))
    first = draw(st.integers(0, 16 - count))
    in_order = list(range(first, first + count))
    dst_rows = draw(st.just(in_order) | st.permutations(range(16)).map(lambda p: p[:count]))
    return RowCase(entries, src_rows, dst_rows)


@given(row_cases())
def test_host_rows_copy_as_a_plain_loop_does(case: RowCase) -> None:
    wanted = case.expected()
    HostRows().copy(case.what())
    assert [target.tobytes() for target in case.targets] == wanted


@pytest.mark.parametrize("rows", [[0, 2, 1, 3], [3, 4, 5], [5, 4], [2]])
def test_rows_in_order_are_told_from_others(rows: list[int]) -> None:
    """A list that begins and ends as a run does is no run."""
    for src, dst in ((rows, sorted(rows)), (sorted(rows), rows)):
        case = RowCase([(8, 8, 12), (8, 12, 8), (8, 8, 8)], src, dst)
        wanted = case.expected()
        HostRows().copy(case.what())
        assert [target.tobytes() for target in case.targets] == wanted


@pytest.mark.parametrize(
    ("src", "dst", "runs"),
    [
        ([0, 1, 5], [2, 3, 4], [(0, 2, 2), (5, 4, 1)]),
        ([4, 2, 0], [0, 1, 2], [(4, 0, 1), (2, 1, 1), (0, 2, 1)]),
        ([7, 8, 9], [1, 2, 3], [(7, 1, 3)]),
        ([], [], []),
    ],
)
def test_page_runs(src: list[int], dst: list[int], runs: list[tuple[int, ...]]) -> None:
    assert list(zip(*page_runs(ints(*src), ints(*dst)), strict=True)) == runs


def test_listed_rows_to_listed_rows_need_little_memory_beside_them() -> None:
    """16 MiB of rows, as `cold` clears a long request's: through a temporary of 1 MiB."""
    count, width = 1 << 14, 1 << 10
    rows = np.random.default_rng(1).permutation(count)
    source, target = noise(count * width), np.zeros(count * width, np.uint8)
    one = np.ones(1, np.int64)
    what = RowCopy(
        one * source.ctypes.data, one * target.ctypes.data, one * width, one * width, one * width,
        rows, rows[::-1].copy(),
    )  # fmt: skip
    tracemalloc.start()
    HostRows().copy(what)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
    assert (target.reshape(count, width)[rows[::-1]] == source.reshape(count, width)[rows]).all()


def test_host_rows_allocate_what_was_asked_for() -> None:
    address, owner = HostRows().allocate(4096)
    assert (owner.nbytes, owner.ctypes.data) == (4096, address)


# ---------------------------------------------------------------- the writer


@settings(max_examples=80, deadline=None)
@given(scenes())
def test_every_mode_gives_the_same_bytes_and_counts_them(scene: Scene) -> None:
    wanted, (target, draft) = scene.expected(), scene.bytes()
    ranges = {}
    for mode in ("direct", "packed", "auto"):
        engine = MemoryEngine()
        written = scene.send(mode, engine)
        assert scene.found() == wanted, mode
        assert {w.code for w in written} == {0}
        assert sum(w.target_bytes for w in written) == target
        assert sum(w.draft_bytes for w in written) == draft
        assert sum(length for _, _, length in engine.ranges) == target + draft
        assert sum(w.wire_bytes for w in written) == target + draft
        assert sum(w.descriptors for w in written) == len(engine.ranges)
        assert 0 <= sum(w.packed_bytes for w in written) <= (mode != "direct") * (target + draft)
        ends = engine.written()
        assert all(a[1] <= b[0] for a, b in pairwise(ends)), "written twice"
        ranges[mode] = len(engine.ranges)
    assert max(ranges["packed"], ranges["auto"]) <= ranges["direct"]


def test_rounds_through_a_small_buffer_never_need_more_ranges_than_the_direct_path() -> None:
    """A token a page, and a round takes one: packing would save nothing."""
    scene, engine = a_scene(page_size=1, buffer_pages=1.0), MemoryEngine()
    (written,) = scene.send("packed", engine)
    assert (written.packed_bytes, scene.found()) == (0, scene.expected())


def test_packing_makes_one_range_an_entry_of_a_run() -> None:
    engine = MemoryEngine()
    scene = a_scene()
    (written,) = scene.send("packed", engine)
    assert written.descriptors == 1 + 2, "one for the target, one for each draft entry"
    assert len(engine.calls) == 1, "in the target's own batch"
    assert written.packed_bytes == scene.bytes()[1]


def test_a_region_takes_a_strided_slice_in_one_range_an_entry() -> None:
    engine = MemoryEngine()
    pages = np.arange(10)[::-1].copy()
    scene = a_scene(src_heads=1, src_first=0, dst_heads=4, dst_first=3, region=True,
                    src_pages=pages, dst_pages=pages)  # fmt: skip
    (written,) = scene.send("packed", engine)
    area = scene.area.ctypes.data
    assert sum(area <= dst < area + scene.area.nbytes for _, dst, _ in engine.ranges) == 2
    assert scene.found() == scene.expected()
    assert written.packed_bytes == scene.bytes()[1]


def test_without_a_region_a_strided_destination_goes_token_by_token() -> None:
    engine = MemoryEngine()
    (written,) = a_scene(dst_heads=4).send("packed", engine)
    assert written.packed_bytes == 0
    assert written.descriptors == 1 + 2 * 40


def test_a_small_buffer_takes_several_rounds_and_each_is_sent_before_the_next() -> None:
    engine = MemoryEngine()
    scene = a_scene(buffer_pages=3.0)
    (written,) = scene.send("packed", engine)
    assert len(engine.calls) == 4, "10 pages through a buffer of 3"
    assert scene.found() == scene.expected()
    assert written.packed_bytes == scene.bytes()[1]


@pytest.mark.parametrize("pages", [0.0, 0.9])
def test_a_buffer_smaller_than_a_page_is_not_used(pages: float) -> None:
    scene = a_scene(buffer_pages=pages)
    (written,) = scene.send("packed", MemoryEngine())
    assert (written.packed_bytes, scene.found()) == (0, scene.expected())


def test_without_a_buffer_the_direct_path_is_used() -> None:
    scene, engine = a_scene(), MemoryEngine()
    writer = ChunkWriter(engine, HostRows(), lambda: None, "packed")
    written = writer.write("peer:1", scene.plan(), Chunk(scene.src_pages, scene.dst_pages), None)
    assert (written.packed_bytes, scene.found()) == (0, scene.expected())


def test_the_buffer_is_made_once_and_only_when_needed() -> None:
    made = []

    def make() -> PackBuffer:
        made.append(1)
        return scene.pack_buffer()

    scene = a_scene()
    chunk, plan = Chunk(scene.src_pages, scene.dst_pages), scene.plan()
    ChunkWriter(MemoryEngine(), HostRows(), make, "direct").write("peer:1", plan, chunk, None)
    assert not made
    writer = ChunkWriter(MemoryEngine(), HostRows(), make, "packed")
    for _ in range(2):
        writer.write("peer:1", plan, chunk, None)
    assert made == [1]


@pytest.mark.parametrize("error", [None, RuntimeError("CUDA error")])
def test_a_buffer_that_could_not_be_had_is_asked_for_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Fifty chunks meanwhile go without it."""
    now, asked = [1000.0], []
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    scene = a_scene()

    def make() -> PackBuffer | None:
        asked.append(now[0])
        if len(asked) > 1:
            return scene.pack_buffer()
        if error is not None:
            raise error
        return None

    writer = ChunkWriter(MemoryEngine(), HostRows(), make, "packed")
    chunk = Chunk(scene.src_pages, scene.dst_pages)
    if error is not None:  # costs this chunk, and none after it
        with pytest.raises(RuntimeError, match="CUDA error"):
            writer.write("peer:1", scene.plan(), chunk)
    packed = [writer.write("peer:1", scene.plan(), chunk).packed_bytes for _ in range(50)]
    assert (asked, set(packed), scene.found()) == ([1000.0], {0}, scene.expected())
    now[0] += writer_module.RETRY_S
    assert writer.write("peer:1", scene.plan(), chunk).packed_bytes > 0
    assert asked == [1000.0, 1000.0 + writer_module.RETRY_S]


def test_no_buffer_is_made_where_packing_would_not_save_ranges() -> None:
    """Whole rows in one run: two ranges already, even where packing is asked for."""
    scene = a_scene(src_heads=1, src_first=0)
    writer = ChunkWriter(MemoryEngine(), HostRows(), lambda: pytest.fail("made"), "packed")
    written = writer.write("peer:1", scene.plan(), Chunk(scene.src_pages, scene.dst_pages), None)
    assert (written.descriptors, scene.found()) == (1 + 2, scene.expected())


@pytest.mark.parametrize("tcp", [True, False])
def test_calls_over_tcp_have_no_more_ranges_than_it_takes(tcp: bool) -> None:
    """Over RDMA nothing cuts them."""
    pages = np.arange(POOL_PAGES)
    scene = a_scene(page_size=128, src_pages=pages, dst_pages=pages[::-1].copy())
    engine = MemoryEngine()
    scene.send("direct", BoundedEngine(engine, MemoryEngine) if tcp else engine)
    ranges = 2 * POOL_PAGES * 128 + POOL_PAGES
    assert max(map(len, engine.calls)) == (MAX_DESCRIPTORS if tcp else ranges)
    assert len(engine.ranges) == ranges
    assert scene.found() == scene.expected()


@pytest.mark.parametrize("most_pages", [1, 3, POOL_PAGES, 2 * POOL_PAGES])
@pytest.mark.parametrize("mode", ["direct", "packed"])
@pytest.mark.parametrize("region", [True, False])
def test_calls_have_no_more_pages_than_is_asked_for(
    mode: str, region: bool, most_pages: int
) -> None:
    """SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES, here of target and drafter together."""
    pages = np.arange(POOL_PAGES)
    scene = a_scene(src_pages=pages, dst_pages=pages[::-1].copy(), skip=2, region=region)
    engine = MemoryEngine()
    scene.send(mode, engine, most_pages)
    assert scene.found() == scene.expected()
    assert len(engine.calls) == -(-POOL_PAGES // most_pages)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
@pytest.mark.parametrize("mode", ["direct", "packed"])
def test_a_return_code_stops_the_chunk_and_is_reported(mode: str, fail_at: int) -> None:
    sizes = {"page_size": 128, "buffer_pages": 3.0}
    scene, engine = a_scene(**sizes), MemoryEngine(fail_at, -7)
    (written,) = scene.send(mode, BoundedEngine(engine, MemoryEngine))
    assert written.code == -7
    assert len(engine.calls) == fail_at + 1, "nothing is sent after the failed call"
    assert scene.found() != scene.expected()


def test_pages_before_the_window_are_not_sent() -> None:
    scene, engine = a_scene(skip=10), MemoryEngine()
    (written,) = scene.send("auto", engine)
    assert (written.draft_bytes, len(engine.ranges)) == (0, 1), "the target only"


def test_an_empty_chunk_sends_nothing() -> None:
    engine = MemoryEngine()
    (written,) = a_scene(src_pages=ints(), dst_pages=ints()).send("packed", engine)
    assert written == Written(0, 0, 0, 0, 0, 0)
    assert not engine.calls


@pytest.mark.parametrize(
    ("descriptors", "mean", "packed"),
    [
        (DIRECT_DESCRIPTORS, 256, False),
        (DIRECT_DESCRIPTORS + 1, 256, True),
        (DIRECT_DESCRIPTORS + 1, DIRECT_MEAN, False),
        (DIRECT_DESCRIPTORS + 1, DIRECT_MEAN - 1, True),
    ],
)
def test_the_rule_of_auto(descriptors: int, mean: int, packed: bool) -> None:
    assert prefer_packed(descriptors, descriptors * mean, "auto") is packed
    assert prefer_packed(descriptors, descriptors * mean, "packed") is True
    assert prefer_packed(descriptors, descriptors * mean, "direct") is False


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
        self.regions.check_integrity()
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
    regions._held[ALIGNMENT] = ALIGNMENT
    with pytest.raises(AssertionError, match="overlaps"):
        regions.check_integrity()
