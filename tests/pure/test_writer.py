"""The writer of chunks: ways, packing and rounds, byte by byte in this process's memory.

The engine here applies the ranges it is given to memory, so a wrong address shows as wrong
bytes. What is expected is computed with plain loops over (page, slot, head).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from rig.scene import POOL_PAGES, MemoryEngine, Scene, a_scene, ints, over, scenes

from sglang_mixkv.kv.plan import Plan, Reach
from sglang_mixkv.kv.ranges import Blocks, page_runs
from sglang_mixkv.prefill import packing, worker
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.prefill.worker import PackMemory
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter, Sending, Written
from sglang_mixkv.rows.host import Buffer, HostRows, RowCopy
from sglang_mixkv.transport.base import Limits
from sglang_mixkv.transport.mooncake import FEW, SHORT, WAITED_FOR, InFlight, Mooncake


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


@settings(max_examples=80, deadline=None)
@given(scenes())
def test_every_mode_gives_the_same_bytes_and_counts_them(scene: Scene) -> None:
    wanted, (target, draft) = scene.expected(), scene.bytes()
    ranges = {}
    for mode in ("direct", "packed", "auto"):
        engine = MemoryEngine()
        written = scene.send(mode, over(engine))
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
    (written,) = scene.send("packed", over(engine))
    assert (written.packed_bytes, scene.found()) == (0, scene.expected())


def test_packing_makes_one_range_an_entry_of_a_run() -> None:
    engine = MemoryEngine()
    scene = a_scene()
    (written,) = scene.send("packed", over(engine))
    assert written.descriptors == 1 + 2, "one for the target, one for each draft entry"
    assert len(engine.calls) == 1, "in the target's own batch"
    assert written.packed_bytes == scene.bytes()[1]


def test_a_region_takes_a_strided_slice_in_one_range_an_entry() -> None:
    engine = MemoryEngine()
    pages = np.arange(10)[::-1].copy()
    scene = a_scene(src_heads=1, src_first=0, dst_heads=4, dst_first=3, region=True,
                    src_pages=pages, dst_pages=pages)  # fmt: skip
    (written,) = scene.send("packed", over(engine))
    area = scene.area.ctypes.data
    assert sum(area <= dst < area + scene.area.nbytes for _, dst, _ in engine.ranges) == 2
    assert scene.found() == scene.expected()
    assert written.packed_bytes == scene.bytes()[1]


def test_without_a_region_a_strided_destination_goes_token_by_token() -> None:
    engine = MemoryEngine()
    (written,) = a_scene(dst_heads=4).send("packed", over(engine))
    assert written.packed_bytes == 0
    assert written.descriptors == 1 + 2 * 40


def test_a_small_buffer_takes_several_rounds_and_each_is_sent_before_the_next() -> None:
    engine = MemoryEngine()
    scene = a_scene(buffer_pages=3.0)
    (written,) = scene.send("packed", over(engine))
    assert len(engine.calls) == 4, "10 pages through a buffer of 3"
    assert scene.found() == scene.expected()
    assert written.packed_bytes == scene.bytes()[1]


@pytest.mark.parametrize("pages", [0.0, 0.9])
def test_a_buffer_smaller_than_a_page_is_not_used(pages: float) -> None:
    scene = a_scene(buffer_pages=pages)
    (written,) = scene.send("packed", over(MemoryEngine()))
    assert (written.packed_bytes, scene.found()) == (0, scene.expected())


def test_without_a_buffer_the_direct_path_is_used() -> None:
    scene, engine = a_scene(), MemoryEngine()
    writer = ChunkWriter(over(engine), HostRows(), lambda: None, "packed")
    written = writer.write("peer:1", scene.plan(), Chunk(scene.src_pages, scene.dst_pages), None)
    assert (written.packed_bytes, scene.found()) == (0, scene.expected())


def test_the_buffer_is_made_once_and_only_when_needed() -> None:
    made = []

    def make() -> PackBuffer:
        made.append(1)
        return scene.pack_buffer()

    scene = a_scene()
    chunk, plan = Chunk(scene.src_pages, scene.dst_pages), scene.plan()
    ChunkWriter(over(MemoryEngine()), HostRows(), make, "direct").write("peer:1", plan, chunk, None)
    assert not made
    writer = ChunkWriter(over(MemoryEngine()), HostRows(), make, "packed")
    for _ in range(2):
        writer.write("peer:1", plan, chunk, None)
    assert made == [1]


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("CUDA error")])
def test_a_buffer_that_could_not_be_had_is_asked_for_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Fifty chunks meanwhile go without it. Too little memory costs no chunk, a CUDA error one."""
    now, asked = [1000.0], []
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Rows(HostRows):
        def allocate(self, size: int) -> Buffer:
            asked.append(now[0])
            if len(asked) == 1:
                raise error
            return super().allocate(size)

    scene, transport = a_scene(), over(MemoryEngine())
    memory = PackMemory(transport, Rows(), 1 << 16)
    writer = ChunkWriter(transport, HostRows(), memory.get, "packed")
    chunk = Chunk(scene.src_pages, scene.dst_pages)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="CUDA error"):
            writer.write("peer:1", scene.plan(), chunk)
    packed = [writer.write("peer:1", scene.plan(), chunk).packed_bytes for _ in range(50)]
    assert (asked, set(packed), scene.found()) == ([1000.0], {0}, scene.expected())
    now[0] += worker.RETRY_BUFFER_S
    assert writer.write("peer:1", scene.plan(), chunk).packed_bytes > 0
    assert asked == [1000.0, 1000.0 + worker.RETRY_BUFFER_S]


def test_no_buffer_is_made_where_packing_would_not_save_ranges() -> None:
    """Whole rows in one run: two ranges already, even where packing is asked for."""
    scene = a_scene(src_heads=1, src_first=0)
    writer = ChunkWriter(over(MemoryEngine()), HostRows(), lambda: pytest.fail("made"), "packed")
    written = writer.write("peer:1", scene.plan(), Chunk(scene.src_pages, scene.dst_pages), None)
    assert (written.descriptors, scene.found()) == (1 + 2, scene.expected())


@pytest.mark.parametrize("tcp", [True, False])
def test_calls_over_tcp_have_no_more_ranges_than_it_takes(tcp: bool) -> None:
    """Over RDMA nothing cuts them."""
    pages = np.arange(POOL_PAGES)
    scene = a_scene(page_size=128, src_pages=pages, dst_pages=pages[::-1].copy())
    engine = MemoryEngine()
    scene.send("direct", over(engine, InFlight() if tcp else None))
    ranges = 2 * POOL_PAGES * 128 + POOL_PAGES
    assert max(map(len, engine.calls)) == (WAITED_FOR if tcp else ranges)
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
    scene = a_scene(src_pages=pages, dst_pages=pages[::-1].copy(), skips=(2, 5), region=region,
                    most_pages=most_pages)  # fmt: skip
    engine = MemoryEngine()
    scene.send(mode, over(engine))
    assert scene.found() == scene.expected()
    assert len(engine.calls) == -(-POOL_PAGES // most_pages)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
@pytest.mark.parametrize("mode", ["direct", "packed"])
def test_a_return_code_stops_the_chunk_and_is_reported(mode: str, fail_at: int) -> None:
    """Calls of as many ranges as fit, and rounds."""
    sizes = {"page_size": 128, "buffer_pages": 3.0}
    scene, engine = a_scene(**sizes), MemoryEngine(fail_at, -7)
    (written,) = scene.send(mode, over(engine, InFlight() if mode == "direct" else None))
    assert written.code == -7
    assert len(engine.calls) == fail_at + 1, "nothing is sent after the failed call"
    assert scene.found() != scene.expected()


def test_pages_before_the_window_are_not_sent() -> None:
    scene, engine = a_scene(skips=(10,)), MemoryEngine()
    (written,) = scene.send("auto", over(engine))
    assert (written.draft_bytes, len(engine.ranges)) == (0, 1), "the target only"


def test_an_empty_chunk_sends_nothing() -> None:
    engine = MemoryEngine()
    (written,) = a_scene(src_pages=ints(), dst_pages=ints()).send("packed", over(engine))
    assert written == Written(0, 0, 0, 0, 0, 0)
    assert not engine.calls


@pytest.mark.parametrize(
    ("ranges", "mean", "packed"),
    [(FEW, 256, False), (FEW + 1, 256, True), (FEW + 1, SHORT, False), (FEW + 1, SHORT - 1, True)],
)
def test_the_rule_of_auto(ranges: int, mean: int, packed: bool) -> None:
    limits = Limits(FEW, SHORT)
    assert limits.worth_packing(ranges, ranges * mean, "auto") is packed
    assert limits.worth_packing(ranges, ranges * mean, "packed") is True
    assert limits.worth_packing(ranges, ranges * mean, "direct") is False


# ---------------------------------------------------------------- rounds that overlap


class LateEngine(MemoryEngine):
    """Ranges that were begun are read and written when somebody asks about them, not before.

    `events`: what happened, in order. `lost`: numbers of begun writes (from 1) that fail.
    """

    def __init__(self, lost: tuple[int, ...] = (), fail_at: int = -1) -> None:
        super().__init__(fail_at)
        self.engine, self.lost = self, lost
        self.under_way: list[tuple[int, int, int]] = []
        self.events: list[str] = []

    def batch_transfer_sync(self, *call: object) -> int:
        self.events.append("call")
        return super().batch_transfer_sync(*call)  # type: ignore[arg-type]

    def transfer_submit_write(self, session: str, src: int, dst: int, length: int) -> int:
        assert all(type(value) is int for value in (src, dst, length))
        self.events.append("begun")
        self.under_way.append((src, dst, length))
        return len(self.under_way)

    def transfer_check_status(self, number: int) -> int:
        self.events.append("ended")
        src, dst, length = self.under_way[number - 1]
        if number in self.lost:
            return -1
        ctypes.memmove(dst, src, length)
        return 1

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        return [*super().ranges, *self.under_way]


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "FIRST_ROUND", 1)
    monkeypatch.setattr(packing, "MANY_ROUNDS", 2)


def send(scene: Scene, late: LateEngine, mode: str = "packed") -> list[int]:
    """Codes of the chunks, over an engine that can write asynchronously."""
    return [one.code for one in scene.send(mode, over(late, InFlight()))]


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(scenes())
def test_rounds_that_overlap_give_the_same_bytes(scene: Scene) -> None:
    wanted, needed = scene.expected(), sum(scene.bytes())
    for mode in ("packed", "auto"):
        late = LateEngine()
        assert set(send(scene, late, mode)) == {0}
        assert scene.found() == wanted, mode
        assert late.events.count("begun") == late.events.count("ended")
        assert sum(length for _, _, length in late.ranges) == needed
        ends = late.written()
        assert all(a[1] <= b[0] for a, b in pairwise(ends)), "written twice"


def test_the_next_round_is_packed_before_the_last_one_is_waited_for() -> None:
    """Ten pages in rounds of 1, 4 and 5, two ranges each; then the target, then the wait."""
    late = LateEngine()
    assert send(a_scene(), late) == [0]
    assert late.events == ["begun"] * 6 + ["call"] + ["ended"] * 6


def test_the_buffer_is_not_used_again_before_it_was_read() -> None:
    """Room for four pages: a round of 1, and then 2 at a time."""
    late, scene = LateEngine(), a_scene(buffer_pages=4.0)
    assert send(scene, late) == [0]
    assert scene.found() == scene.expected()
    first = late.events.index("ended")
    assert late.events[:first] == ["begun"] * 4
    assert "begun" in late.events[first:]


def test_without_that_wait_bytes_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PackBuffer.rounds

    def hasty(self: PackBuffer, *most: Any) -> object:
        return real(self, *most[:-1], lambda: 0)

    monkeypatch.setattr(PackBuffer, "rounds", hasty)
    scene = a_scene(buffer_pages=4.0)
    assert send(scene, LateEngine()) == [0]
    assert scene.found() != scene.expected()


def test_a_small_chunk_goes_in_one_call() -> None:
    page, late = np.arange(1), LateEngine()
    assert send(a_scene(src_pages=page, dst_pages=page), late) == [0]
    assert late.events == ["call"]


@pytest.mark.parametrize("lost", [1, 4, 6])
def test_a_begun_write_that_fails_fails_the_chunk(lost: int) -> None:
    """All are waited for even so, since they read the buffer."""
    late = LateEngine(lost=(lost,))
    assert send(a_scene(), late) == [-1]
    assert late.events.count("ended") == 6


def test_nothing_is_packed_over_a_round_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, copies = HostRows.copy, []

    def counted(self: HostRows, what: RowCopy) -> None:
        copies.append(what)
        real(self, what)

    monkeypatch.setattr(HostRows, "copy", counted)
    late = LateEngine(lost=(1,))
    assert send(a_scene(buffer_pages=4.0), late) == [-1]
    assert late.events == ["begun"] * 4 + ["ended"] * 4
    assert len(copies) == 2


def gqa(pages: int, buffer_pages: float) -> tuple[Scene, Plan]:
    """A target whose heads are packed as the drafter's are: two packings in one chunk."""
    run = np.arange(pages)
    scene = a_scene(src_pages=run, dst_pages=run + 1, buffer_pages=buffer_pages)
    target, draft = (scene.draft().at(entry) for entry in range(2))
    return scene, replace(scene.plan(), target=target, draft=(Reach(0, draft),))


@pytest.mark.parametrize("buffer_pages", [2.0, 4.0, 100.0])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("pages", [1, 2, 3, 10])
def test_two_packings_share_the_buffer(
    pages: int, late: bool, buffer_pages: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may not be packed over the other before it was read, begun or not."""
    scene, plan = gqa(pages, buffer_pages)
    if pages < 10:  # one round each
        monkeypatch.setattr(packing, "MANY_ROUNDS", 100)
    transport = over(LateEngine(), InFlight()) if late else over(MemoryEngine())
    writer = ChunkWriter(transport, HostRows(), scene.pack_buffer, "packed")
    written = writer.write("peer:1", plan, Chunk(scene.src_pages, scene.dst_pages))
    assert written.code == 0
    assert scene.found()[1:] == scene.expected()[1:]
    assert written.packed_bytes == written.wire_bytes == scene.bytes()[1]


def test_where_writes_cannot_all_be_begun_there_is_one_round() -> None:
    late = LateEngine()
    (written,) = a_scene().send("packed", over(late, InFlight(asynchronous=5)))
    assert written.code == 0
    assert late.events == ["call"], "three rounds of two entries would be six"


def test_rows_that_are_copied_in_no_time_are_packed_in_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostRows, "takes_long", False)
    late = LateEngine()
    assert send(a_scene(), late) == [0]
    assert late.events == ["call"]


def test_begun_writes_are_waited_for_when_a_call_fails() -> None:
    late = LateEngine(fail_at=0)
    assert send(a_scene(), late) == [-1]
    assert late.events[-6:] == ["ended"] * 6


@pytest.mark.parametrize("lost", [(), (2,)])
def test_begun_writes_are_waited_for_when_packing_raises(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...]
) -> None:
    """It raises where all that was begun has arrived; else the transport's code says more."""
    real, copies = HostRows.copy, []

    def once(self: HostRows, what: object) -> None:
        copies.append(what)
        if len(copies) == 3:
            raise MemoryError("no more")
        real(self, what)  # type: ignore[arg-type]

    monkeypatch.setattr(HostRows, "copy", once)
    late = LateEngine(lost)
    if lost:
        assert send(a_scene(), late) == [-1]
    else:
        with pytest.raises(MemoryError, match="no more"):
            send(a_scene(), late)
    assert late.events == ["begun"] * 4 + ["ended"] * 4


def test_what_cannot_be_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mooncake, "_begin", lambda *_: None)
    scene, late = a_scene(), LateEngine()
    assert send(scene, late) == [0]
    assert scene.found() == scene.expected()
    assert late.events == ["call"] * 4


def test_an_engine_that_only_waits_gets_rounds_as_large_as_the_buffer() -> None:
    scene, engine = a_scene(), MemoryEngine()
    scene.send("packed", over(engine))
    assert len(engine.calls) == 1


@pytest.mark.parametrize(
    ("pages", "buffer", "overlap", "sizes"),
    [
        (10, 100, True, [1, 4, 5]),
        (10, 6, True, [1, 3, 3, 3]),
        (3, 100, False, [3]),
        (10, 4, False, [4, 4, 2]),
        (1, 100, True, [1]),
        (3, 1, True, [1, 1, 1]),
    ],
)
def test_rounds(pages: int, buffer: int, overlap: bool, sizes: list[int]) -> None:
    """Small first, then four times as large, at most half of the buffer; or the whole of it."""
    scene = a_scene(buffer_pages=float(buffer))
    draft = scene.draft()
    cuts = scene.pack_buffer().cuts(draft, scene.page_size, pages, overlap)
    assert [len(cut) for cut in cuts] == sizes
    assert [page for cut in cuts for page in cut] == list(range(pages))


def test_a_code_ends_the_chunk() -> None:
    late = LateEngine(fail_at=0)
    sending, one = Sending(over(late, InFlight()), "peer:1"), np.ones(1, np.int64)
    sending.write(Blocks(one, one, one))
    sending.write(Blocks(one, one, one), overlap=True)
    assert (late.events, sending.settle(), sending.descriptors) == (["call"], -1, 1)


def test_small_rounds_do_not_keep_a_chunk_from_being_packed() -> None:
    """Two ranges: a round each of a page would not halve them, one round does."""
    pages, late = np.arange(2)[::-1].copy(), LateEngine()
    scene = a_scene(src_heads=1, src_first=0, dst_heads=4, region=True,
                    src_pages=pages, dst_pages=pages)  # fmt: skip
    assert send(scene, late) == [0]
    assert (late.events, scene.found()) == (["call"], scene.expected())
    assert len(late.ranges) == 2 + 2, "of the target, and one of each draft entry"
