"""Rounds that are packed while others are on the wire."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from scene import MemoryEngine, Scene, a_scene, scenes
from sglang_mixkv.transport.ahead import Ahead

from sglang_mixkv.kv.plan import Plan
from sglang_mixkv.kv.ranges import Blocks
from sglang_mixkv.prefill import packing as packed
from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.prefill.writer import Chunk, ChunkWriter
from sglang_mixkv.rows.host import HostRows, RowCopy
from sglang_mixkv.transport import base as direct
from sglang_mixkv.transport.mooncake import BoundedEngine


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

    def send_probe(self, session: str) -> int:
        return -1

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        return [*super().ranges, *self.under_way]


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "FIRST_ROUND", 1)
    monkeypatch.setattr(packed, "MANY_ROUNDS", 2)


def send(scene: Scene, late: LateEngine, mode: str = "packed") -> list[int]:
    """Codes of the chunks, over an engine that can begin writes."""

    def make() -> LateEngine:
        pytest.fail("replaced")

    return [one.code for one in scene.send(mode, BoundedEngine(late, make))]


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
    plan = scene.plan()
    return scene, replace(plan, target=plan.draft.at(0), draft=plan.draft.at(1))


@pytest.mark.parametrize("buffer_pages", [2.0, 4.0, 100.0])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("pages", [1, 2, 3, 10])
def test_two_packings_share_the_buffer(
    pages: int, late: bool, buffer_pages: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may not be packed over the other before it was read, begun or not."""
    scene, plan = gqa(pages, buffer_pages)
    if pages < 10:  # one round each
        monkeypatch.setattr(packed, "MANY_ROUNDS", 100)
    engine = BoundedEngine(LateEngine(), LateEngine) if late else MemoryEngine()
    writer = ChunkWriter(engine, HostRows(), scene.pack_buffer, "packed")
    written = writer.write("peer:1", plan, Chunk(scene.src_pages, scene.dst_pages))
    assert written.code == 0
    assert scene.found()[1:] == scene.expected()[1:]
    assert written.packed_bytes == written.wire_bytes == scene.bytes()[1]


def test_where_writes_cannot_all_be_begun_there_is_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct, "STARTED", 5)
    late = LateEngine()
    assert send(a_scene(), late) == [0]
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


@pytest.mark.parametrize(("lost", "error"), [((), MemoryError), ((2,), Unfinished)])
def test_begun_writes_are_waited_for_when_packing_raises(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...], error: type[Exception]
) -> None:
    """What is raised says whether all that was begun has arrived."""
    real, copies = HostRows.copy, []

    def once(self: HostRows, what: object) -> None:
        copies.append(what)
        if len(copies) == 3:
            raise MemoryError("no more")
        real(self, what)  # type: ignore[arg-type]

    monkeypatch.setattr(HostRows, "copy", once)
    late = LateEngine(lost)
    with pytest.raises(error, match="no more"):
        send(a_scene(), late)
    assert late.events == ["begun"] * 4 + ["ended"] * 4


def test_what_cannot_be_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedEngine, "start", lambda *_: None)
    scene, late = a_scene(), LateEngine()
    assert send(scene, late) == [0]
    assert scene.found() == scene.expected()
    assert late.events == ["call"] * 4


def test_an_engine_that_only_waits_gets_rounds_as_large_as_the_buffer() -> None:
    scene, engine = a_scene(), MemoryEngine()
    scene.send("packed", engine)
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
    draft = scene.plan().draft
    cuts = scene.pack_buffer().cuts(draft, scene.page_size, pages, overlap)
    assert [len(cut) for cut in cuts] == sizes
    assert [page for cut in cuts for page in cut] == list(range(pages))


def test_a_code_ends_the_chunk() -> None:
    late = LateEngine(fail_at=0)
    ahead = Ahead(BoundedEngine(late, LateEngine), "peer:1")
    one = np.ones(1, np.int64)
    assert ahead.write(Blocks(one, one, one), wait=True) == -1
    assert ahead.write(Blocks(one, one, one), wait=False) == -1
    assert (late.events, ahead.settle()) == (["call"], -1)


def test_small_rounds_do_not_keep_a_chunk_from_being_packed() -> None:
    """Two ranges: a round each of a page would not halve them, one round does."""
    pages, late = np.arange(2)[::-1].copy(), LateEngine()
    scene = a_scene(src_heads=1, src_first=0, dst_heads=4, region=True,
                    src_pages=pages, dst_pages=pages)  # fmt: skip
    assert send(scene, late) == [0]
    assert (late.events, scene.found()) == (["call"], scene.expected())
    assert len(late.ranges) == 2 + 2, "of the target, and one of each draft entry"
