"""Batches of rows_gpu.py, compared byte by byte with DraftRows.

test_rows_gpu.py runs this file in a process of its own, in which Triton interprets the kernels on
host memory.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rig.channel import threads
from rig.channel.fake_cuda import CAPTURES, LAUNCH_FAILED, FakeCuda
from rig.channel.invariants import outstanding, violations

from sglang_mixkv.channel import loop
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft import cuda
from sglang_mixkv.draft.cuda import CudaError, UnsafeError
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.rows_gpu import MAX_BATCH, GpuJob, GpuRows
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

CPU = torch.device("cpu")
OK, STALE, DIFFERS, ERROR = SlotCheck
CANARY = 0xEE
UPLOAD = "upload"
BATCH_OF_8 = Counter(
    cuCtxSetCurrent=1, cuMemcpyHtoDAsync_v2=1, cuLaunchKernel=2, cuEventCreate=1, cuEventRecord=1
)


def ended(ticket: Any) -> list[SlotCheck]:
    while not ticket.done():
        pass
    return ticket.results


@dataclass
class Side:
    """A pool and its slots, and a copy of both that DraftRows uses as a reference."""

    widths: list[int]
    held: range
    page: int
    num_pages: int
    seed: int
    slots: int = 4
    slot_bytes: int = 1 << 14
    cuda: FakeCuda = field(default_factory=FakeCuda)

    def __post_init__(self) -> None:
        noise, rows = np.random.default_rng(self.seed), self.num_pages * self.page
        pool = [noise.integers(0, 256, (rows, len(self.held), n), np.uint8) for n in self.widths]
        self.pool, self.wanted = ([torch.from_numpy(e.copy()) for e in pool] for _ in "ab")
        self.staging, self.beside = (Staging(self.slots, self.slot_bytes, CPU) for _ in "ab")
        self.draft = DraftRows(self.wanted, self.held)
        with self.cuda.compiling():
            self.rows = GpuRows(
                DraftRows(self.pool, self.held), self.page, self.staging, self.cuda.driver()
            )
        for staging in (self.staging, self.beside):
            staging._memory.fill_(CANARY)

    def same(self) -> bool:
        return all(map(torch.equal, self.pool, self.wanted)) and torch.equal(
            self.staging._memory, self.beside._memory
        )

    def zero(self, one: Segment) -> None:
        """Zero the reference rows of a segment, as the kernels do for a slot that they reject."""
        heads = slice(one.heads.start - self.held.start, one.heads.stop - self.held.start)
        for entry in self.wanted:
            entry[torch.from_numpy(one.rows(self)), heads] = 0


class Segment(NamedTuple):
    """Some heads of some tokens of a room. `pages`: all pages of the room."""

    pages: np.ndarray
    first: int
    tokens: int
    heads: range
    slot: int
    stamp: int

    def job(self, side: Side) -> GpuJob:
        return side.rows.job(side.rows.pages(self.pages), *self[1:])

    def rows(self, side: Side) -> np.ndarray:
        return Pages(self.pages, side.page).rows(self.first, self.tokens)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Side, list[Segment]]:
    """Draw two rooms with successive segments, each of all requested heads or of one of them."""
    width = st.sampled_from([16, 48, 80, 128, 256, 272])
    widths = [w for w in (draw(width), draw(width)) for _ in range(draw(st.sampled_from([1, 3])))]
    start, stop = sorted(draw(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)))
    held, page = range(draw(st.integers(0, start)), draw(st.integers(stop, 6))), draw(PAGE_SIZES)
    side = Side(widths, held, page, -(-300 // page), draw(st.integers(0, 99)), slot_bytes=1 << 16)
    order, segments = np.random.default_rng(side.seed).permutation(side.num_pages), []
    ends = [0, 0]
    for slot in draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]:
        room, one = draw(st.integers(0, 1)), draw(st.integers(start, stop - 1))
        pages = np.array_split(order, 2)[room]
        heads = draw(st.sampled_from([range(start, stop), range(one, one + 1)]))
        fits = (side.slot_bytes - HEADER) // (sum(widths) * len(heads))
        left = min(fits, len(pages) * page - ends[room])
        tokens = draw(st.sampled_from([min(n, left) for n in (0, 1, 5, 63, 65, left)]))
        segments.append(Segment(pages, ends[room], tokens, heads, slot, draw(STAMPS)))
        ends[room] += tokens
    return side, segments


PAGE_SIZES, STAMPS = st.sampled_from([1, 16, 64]), st.integers(0, (1 << 64) - 1)
EXAMPLES = int(os.environ.get("EXAMPLES", 6))


@settings(max_examples=EXAMPLES, suppress_health_check=HealthCheck)
@given(batch=batches(), data=st.data())
def test_batches_equal_draft_rows(batch: tuple[Side, list[Segment]], data: st.DataObject) -> None:
    """Batches pack, unpack and clear exactly as DraftRows does.

    The test compares every byte of the pool and the staging buffer. Some of the unpacked slots have
    another stamp or a flipped bit, and their rows must be zeros.
    """
    side, segments = batch
    ticket = side.rows.start("pack", [one.job(side) for one in segments])
    for one in segments:
        side.draft.pack(one.rows(side), one.heads, side.beside.slot(one.slot), one.stamp)
    assert ended(ticket) == [OK] * len(segments)
    assert side.same()
    for entry in (*side.pool, *side.wanted):
        entry.fill_(CANARY)
    jobs, expected = list[GpuJob](), []
    for one in segments:
        expected.append(data.draw(st.sampled_from([OK, OK, STALE, DIFFERS])))
        memory, stamp = side.staging.slot(one.slot), one.stamp
        if expected[-1] is STALE and data.draw(st.booleans()):
            stamp ^= 1 << data.draw(st.integers(0, 63))
        elif expected[-1] is not OK:
            size = side.draft.packed_bytes(one.tokens, len(one.heads))
            damaged = range(8) if expected[-1] is STALE else [*range(8, 16), *range(HEADER, size)]
            memory[data.draw(st.sampled_from(damaged))] ^= 1 << data.draw(st.integers(0, 7))
        else:
            side.draft.unpack(one.rows(side), one.heads, memory, stamp)
        if expected[-1] is not OK:
            side.zero(one)
        jobs.append(one._replace(stamp=stamp).job(side))
    side.beside._memory.copy_(side.staging._memory)
    assert ended(side.rows.start("unpack", jobs)) == expected
    assert side.same()
    cleared = [side.rows.job(side.rows.pages(o[0]), *o[1:3]) for o in segments]
    ticket = side.rows.start("clear", cleared)
    for one in segments:
        side.draft.clear(one.rows(side))
    assert ended(ticket) == [OK] * len(segments)
    assert side.same()


def small(cuda: FakeCuda | None = None) -> Side:
    """Make a pool of 8 pages of 16 tokens. A token has 48 bytes per head."""
    return Side([16, 32], range(4, 6), 16, 8, 5, 8, 4096, cuda or FakeCuda())


# ---------------------------------------------------------------- starting and polling


def eight(side: Side, page: int = 1) -> list[GpuJob]:
    pages = side.rows.pages([page])
    return [side.rows.job(pages, 2 * n, 2, range(4, 6), n, 1 + n) for n in range(8)]


def test_a_batch_makes_six_calls_that_keep_the_gil() -> None:
    """A batch makes six driver calls, compiles nothing, and never releases the GIL.

    It calls the driver through ctypes.PyDLL, which keeps the GIL. Calls of torch or numpy would
    release it.
    """
    side, tickets = small(FakeCuda(captures=0)), []  # a ticket's event is destroyed with it
    one = side.rows.job(side.rows.pages([3]), 5, 11, range(5, 6))
    called = set[str]()

    def see(frame: Any, event: str, what: Any) -> None:
        if event == "c_call":
            name = getattr(what, "__module__", None) or type(what.__self__).__module__
            called.add(name.partition(".")[0])

    for what in ("pack", "unpack"):
        for jobs in (eight(side, 3), eight(side, 3)[:1], [one]):
            side.cuda.calls.clear()
            sys.setprofile(see)
            try:
                tickets.append(side.rows.start(what, jobs))
                is_done = tickets[-1].done()
            finally:
                sys.setprofile(None)
            assert not is_done
            assert tickets[-1].done()
            assert side.cuda.calls == BATCH_OF_8 + Counter(cuEventQuery=2)
    assert called & {"torch", "numpy"} == set()
    assert "_struct" in called
    assert ended(side.rows.start("clear", [one])) == [OK]
    assert len(side.cuda.compiled) == 5


def test_two_batches_in_flight_share_no_memory() -> None:
    """Two batches in flight do not share memory for jobs, page numbers or results.

    The second batch is prepared before the first has run.
    """
    side, tickets = small(FakeCuda(late=3)), []
    for number in range(2):
        one = Segment(np.array([number + 1]), 1, 9, range(4, 6), number, 7 + number)
        tickets.append(side.rows.start("pack", [one.job(side)]))
        side.draft.pack(one.rows(side), one.heads, side.beside.slot(number), one.stamp)
    assert not side.rows.can_start
    with pytest.raises(ValueError, match="0 of 2 batches free"):
        side.rows.start("clear", eight(side))
    assert ended(tickets[1]) == ended(tickets[0]) == [OK]
    assert side.rows.can_start
    assert side.same()


@pytest.mark.parametrize(("page", "rows"), [(16, 64), (1, 4096)])
def test_page_numbers_of_the_largest_batches_fit(page: int, rows: int) -> None:
    """The page numbers of the largest batches fit their buffer.

    These batches fill all slots with rows of one head from the same pages, or clear a whole pool.
    """
    side = Side([16, 16], range(2), page, rows // page, 1, MAX_BATCH, 1024)
    pages, heads = side.rows.pages(np.arange(rows // page)), range(1)
    jobs = [side.rows.job(pages, page - 1, 30, heads, slot, slot) for slot in range(MAX_BATCH)]
    for slot in range(MAX_BATCH):
        side.draft.pack(np.arange(page - 1, page + 29), heads, side.beside.slot(slot), slot)
    assert ended(side.rows.start("pack", jobs)) == [OK] * MAX_BATCH
    assert side.same()
    side.draft.clear(np.arange(rows))
    assert ended(side.rows.start("clear", [side.rows.job(pages, 0, rows)])) == [OK]
    assert side.same()


def test_an_event_belongs_to_one_batch_alone() -> None:
    """A ticket's event reports the end of its own batch, even if later batches are in flight.

    A gate may still refer to a ticket that has ended.
    """
    side = small()
    first = side.rows.start("pack", eight(side))
    ended(first)
    others = [side.rows.start("pack", eight(side)) for _ in range(2)]
    queued = len(side.cuda._queue)
    assert first.over()
    assert len(side.cuda._queue) == queued > 0, "the ticket waited for another batch"
    assert not any(other.done() for other in others)
    del others, first
    gc.collect()
    assert side.cuda.events == {}


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("call", [*BATCH_OF_8, "cuFlushGPUDirectRDMAWrites"])
def test_a_batch_that_cannot_start_frees_its_memory(call: str) -> None:
    """A batch that cannot start raises after its last kernel has ended, and frees its memory.

    During a graph capture, the batch waits for the end of the capture first.
    """
    side = small(FakeCuda(attributes={cuda.RDMA_ORDERING: 0}))
    jobs = eight(side)
    for _ in range(3):
        side.cuda.fails, side.cuda.answers = call, [900, 908]
        with pytest.raises(CudaError, match=f"{call}: CUDA_ERROR_LAUNCH_FAILED"):
            side.rows.start("unpack", jobs)
        assert not side.cuda._queue
        assert not side.cuda.answers
        side.cuda.fails = ""
    assert ended(side.rows.start("pack", jobs)) == [OK] * 8


def test_a_failed_device_ends_all_batches_with_an_error() -> None:
    side, gate = small(), Gate()
    ticket = side.rows.start("clear", eight(side)[:1])
    gate.tickets[ticket] = None
    side.cuda._run_to(None)  # the kernel has stored OK as its result
    side.cuda.broken = True
    assert gate.try_close(), "SGLang's scheduler would wait forever"
    assert ended(ticket) == [ERROR]
    assert "CUDA_ERROR_LAUNCH_FAILED" in ticket.error
    with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
        side.rows.start("pack", eight(side))
    assert side.rows.can_start, "the next batch must fail, not wait forever"


@pytest.mark.parametrize("code", CAPTURES)
def test_no_batch_ends_while_a_graph_is_captured(code: int) -> None:
    """No query reports the end of a batch during a graph capture.

    The channel thread queries the batch, and so does SGLang's scheduler when it closes a gate.
    """
    side, gate = small(FakeCuda(late=0, captures=0)), Gate()
    ticket = side.rows.start("pack", eight(side))
    gate.tickets[ticket] = None
    side.cuda.answers = [code] * 3
    assert not ticket.over()
    assert not ticket.done()
    assert not gate.try_close(), "pages would be released while kernels still use them"
    assert side.cuda._queue
    assert (len(side.rows._free), ticket.error, ticket.results) == (1, "", [])
    side.cuda.answers = [code] * 2
    gate.close()
    assert not side.cuda._queue
    assert not side.cuda.answers
    assert ended(ticket) == [OK] * 8


@pytest.mark.parametrize("asked", ["over", "done"])
@pytest.mark.parametrize("code", [1, 400, 999])
def test_a_failed_query_waits_for_the_batchs_kernels(code: int, asked: str) -> None:
    """A batch whose query fails ends only after its kernels, with the result ERROR.

    The querying thread may have no current device, and a graph may be captured meanwhile.
    """
    side = small(FakeCuda(late=9, captures=0))
    before = [side.rows.start("pack", eight(side)[:1]), side.rows.start("pack", eight(side)[1:])]
    side.cuda.answers = [code, 900, 907]
    asking = threading.Thread(target=getattr(before[1], asked))
    asking.start()
    asking.join(10)
    assert not side.cuda._queue
    assert not side.cuda.answers
    assert before[1].over()
    assert ended(before[1]) == [ERROR] * 7
    assert ended(before[0]) == [OK]
    assert ended(side.rows.start("pack", eight(side))) == [OK] * 8


@pytest.mark.parametrize(("answers", "found"), [([], OK), ([999], ERROR), ([400, 900], ERROR)])
def test_a_batch_has_ended_for_all_threads_at_once(
    answers: list[int], found: SlotCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's scheduler and the channel thread agree on the end of a batch.

    The channel thread polls between any two lines of the scheduler's poll.
    """
    side = small(FakeCuda(late=1, captures=0))
    ticket = side.rows.start("pack", eight(side))
    side.cuda.answers, looks = answers, list[bool]()

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != cuda.__file__:
            return None
        with monkeypatch.context() as other:
            other.setattr(side.cuda, "answers", [])
            side.cuda.events[ticket._handle] = 0  # so that this poll's own query comes too early
            looks.append(ticket.done())
        if looks[-1]:
            assert ticket._handle not in side.cuda._queue, "the batch's kernels may still run"
            assert ticket.results == [found] * 8
        return traced

    before = sys.gettrace()
    try:
        sys.settrace(traced)
        while not ticket.over():
            pass
    finally:
        sys.settrace(before)
    assert not looks[0]
    assert looks[-1]
    assert ended(ticket) == [found] * 8
    assert side.rows.can_start


def test_each_slot_has_a_result_of_its_own() -> None:
    """Each slot of a batch has its own result: some are stale, some damaged and some correct."""
    side, jobs = small(), []
    ended(side.rows.start("pack", eight(side)))
    expected = [OK, STALE, DIFFERS, OK, OK, DIFFERS, STALE, STALE]
    for slot, (found, job) in enumerate(zip(expected, eight(side), strict=True)):
        side.staging.slot(slot)[HEADER + 1] ^= found is DIFFERS
        jobs.append(job._replace(stamp=99) if found is STALE else job)
    assert ended(side.rows.start("unpack", jobs)) == expected
    assert ended(side.rows.start("unpack", jobs[1:3])) == expected[1:3]


@pytest.mark.parametrize(
    ("byte", "found"), [(0, STALE), (8, DIFFERS), (HEADER, OK)], ids=["stamp", "sum", "payload"]
)
def test_stored_rows_match_the_checksum(byte: int, found: SlotCheck) -> None:
    """If a slot changes between the two launches, its rows match the checksum or are zeros."""
    side = small(FakeCuda(captures=0))
    ended(side.rows.start("pack", eight(side)))
    rows = [entry[16:18] for entry in side.pool]
    right = [entry.clone() * (found is OK) for entry in rows]
    for entry in rows:
        entry.fill_(CANARY)
    ticket = side.rows.start("unpack", eight(side)[:1])
    for _ in (UPLOAD, "unpack"):
        side.cuda._queue.popleft()()
    side.staging.slot(0)[byte] ^= 1
    assert ended(ticket) == [found]
    assert all(map(torch.equal, rows, right))


def test_a_slot_with_another_stamp_is_never_stored() -> None:
    """A slot with another stamp is rejected before its rows are stored.

    A wrong checksum is noticed only afterwards.
    """
    side = small(FakeCuda(captures=0))
    ended(side.rows.start("pack", eight(side)))
    rows = [entry[16:18] for entry in side.pool]
    for entry in rows:
        entry.fill_(CANARY)
    ticket = side.rows.start("unpack", [eight(side)[0]._replace(stamp=99)])
    for _ in (UPLOAD, "unpack"):
        side.cuda._queue.popleft()()
    assert all((entry == CANARY).all() for entry in rows)
    assert ended(ticket) == [STALE]
    assert not any(entry.any() for entry in rows)


def test_all_rows_of_a_wrong_slot_are_cleared() -> None:
    """All rows of a slot with a wrong checksum are cleared.

    The kernel has fewer programs than the rows have tiles, so each program clears several tiles.
    """
    side = Side([272], range(6), 1, 140, 1, slots=1, slot_bytes=1 << 18)
    jobs = [side.rows.job(side.rows.pages(np.arange(140)), 5, 130, range(1, 6), 0, 7)]
    assert ended(side.rows.start("pack", jobs)) == [OK]
    side.staging.slot(0)[HEADER] ^= 1
    assert side.rows._grids(jobs)["settle"][0] < side.rows._grids(jobs)["unpack"][0]
    assert ended(side.rows.start("unpack", jobs)) == [DIFFERS]
    side.wanted[0][5:135, 1:] = 0
    assert torch.equal(side.pool[0], side.wanted[0])


def test_a_kernel_without_a_result_is_an_error() -> None:
    """A kernel that stores no result makes its jobs fail, and stops GpuRows at start."""
    side = small()
    side.cuda.compiled = [(image, lambda *_: None) for image, _ in side.cuda.compiled]
    for what in ("pack", "unpack", "clear"):
        assert ended(side.rows.start(what, eight(side))) == [ERROR] * 8
    cuda = FakeCuda()
    cuda._interpret = lambda *_: None
    with pytest.raises(UnsafeError, match=r"expected <SlotCheck.OK: 0>, got \[<SlotCheck.ERROR"):
        small(cuda)


RIGHT = {"pages": [1], "first": 0, "tokens": 2, "heads": range(4, 6), "slot": 0, "stamp": 1}
OUTSIDE: list[dict[str, Any]] = [
    {"heads": range(3, 5)}, {"heads": range(5, 7)}, {"heads": range(5, 5)},
    {"heads": range(4, 6, 2)}, {"first": -1}, {"tokens": -1}, {"first": 15}, {"slot": -1},
    {"slot": 8}, {"pages": [1] * 8, "tokens": 43}, {"pages": []}, {"pages": [0, 8]},
    {"pages": [-1, 3]},
]  # fmt: skip


@pytest.mark.parametrize("wrong", OUTSIDE, ids=str)
def test_a_job_outside_the_pool_or_slots_is_rejected(wrong: dict[str, Any]) -> None:
    """A job outside the pool or the slots is rejected.

    The pool has 8 pages of 16 tokens, with heads 4 and 5. Each of 8 slots holds 42 tokens of both
    heads.
    """
    side, job = small(), RIGHT | wrong
    with pytest.raises(ValueError, match=r"expected|pages|fit"):
        side.rows.job(side.rows.pages(job.pop("pages")), **job)


def test_a_batch_has_1_to_64_jobs() -> None:
    side = small()
    for jobs in ([], eight(side) * 8 + eight(side)[:1]):
        with pytest.raises(ValueError, match="jobs"):
            side.rows.start("clear", jobs)
    assert ended(side.rows.start("clear", eight(side) * 8)) == [OK] * MAX_BATCH


# ---------------------------------------------------------------- writes by a NIC


UNORDERED, CANNOT = {cuda.RDMA_ORDERING: 0}, {cuda.RDMA_FLUSH_OPTIONS: 2}


@pytest.mark.parametrize(
    ("attributes", "flushes"),
    [
        ({}, 0),
        ({cuda.RDMA_ORDERING: 200}, 0),
        (UNORDERED, 1),
        (UNORDERED | {cuda.RDMA_SUPPORTED: 0}, 1),
        (UNORDERED | CANNOT | {cuda.RDMA_SUPPORTED: 0}, 0),
        (UNORDERED | CANNOT, None),
    ],
)
def test_nic_writes_are_flushed_if_the_gpu_does_not_order_them(
    attributes: dict[int, int], flushes: int | None
) -> None:
    """If the GPU does not order writes by a NIC, a batch flushes them before it unpacks.

    `flushes`: the number of flushes per batch. A GPU that can neither order nor flush is rejected
    (None).
    """
    device = FakeCuda(attributes=attributes)
    if flushes is None:
        with pytest.raises(CudaError, match="neither orders"):
            small(device)
        return
    side = small(device)
    for what, count in (("pack", 0), ("unpack", flushes)):
        side.cuda.calls.clear()
        ended(side.rows.start(what, eight(side)))
        assert side.cuda.calls["cuFlushGPUDirectRDMAWrites"] == count


# ---------------------------------------------------------------- the order of calls


BATCHES = {
    "pack": [UPLOAD, "pack", "seal"],
    "unpack": ["flush", UPLOAD, "unpack", "settle"],
    "clear": [UPLOAD, "clear"],
}


@pytest.mark.parametrize("what", BATCHES)
def test_driver_calls_of_a_batch_come_in_order(what: str) -> None:
    """The driver calls of a batch come in the right order, all on the driver's own stream.

    First the thread's device is set, then writes by a NIC are flushed, then the jobs are uploaded
    and the kernels launched. An event without timing comes last.
    """
    side = small(FakeCuda(attributes=UNORDERED, captures=0))
    functions = {function: name for name, (function, _) in side.rows._kernels.items()}
    stream, expected = side.rows.driver.stream, BATCHES[what]
    log, buffers = side.cuda.log, side.rows._free[-1]
    log.clear()
    ticket = side.rows.start(what, eight(side))
    steps: list[Any] = []
    for name, *with_what in log[1:-2]:
        match name:
            case "cuFlushGPUDirectRDMAWrites":
                steps.append("flush")
                assert with_what == [0, 100], "current context, and owner of the memory"
            case "cuMemcpyHtoDAsync_v2":
                steps.append(UPLOAD)
                size = 8 * (64 + 4)  # eight jobs, of one page each
                assert with_what == [buffers.device, buffers.source, size, stream]
            case "cuLaunchKernel":
                steps.append(functions[with_what[0]])
                assert with_what[8] == stream
                assert steps[-1] != "seal" or sorted(with_what[1:4]) == [1, 1, 8], "8 headers"
    assert steps == expected
    assert len(steps) == len(log) - 3, "unexpected calls"
    assert log[0] == ("cuCtxSetCurrent", side.rows.driver._context)
    assert (log[-2][0], log[-2][2]) == ("cuEventCreate", 2)
    assert log[-1] == ("cuEventRecord", ticket._handle, stream)
    assert not ended(ticket).count(ERROR)


def test_a_batchs_memory_is_reused_only_after_its_own_event() -> None:
    """A batch's memory is reused only after a poll has seen the batch's own event."""
    side = small(FakeCuda(late=1, captures=0))
    first, second = (side.rows.start("pack", eight(side)) for _ in range(2))
    assert not second.done()
    assert not first.done()
    assert not side.rows.can_start
    assert second.over(), "the second batch has not ended"
    assert not side.rows.can_start, "the results have not been read yet"
    assert second.done()
    assert side.rows._free == [second._buffers]
    third = side.rows.start("pack", eight(side))
    assert third._buffers is second._buffers is not first._buffers
    assert not side.rows.can_start
    second.done()
    assert not side.rows.can_start, "a batch has freed its memory twice"
    assert ended(first) == ended(third) == [OK] * 8


def test_everything_is_prepared_before_the_first_batch() -> None:
    """GpuRows prepares everything when it is made.

    It retains the context of its device, creates a stream, uploads the table of entries, and loads
    and runs each kernel once.
    """
    device = FakeCuda(captures=0)
    with device.compiling():
        pool = [torch.zeros(128, 2, n, dtype=torch.uint8) for n in (16, 32)]
        staging = Staging(8, 4096, CPU)
        rows = GpuRows(DraftRows(pool, range(4, 6)), 16, staging, cuda.Driver(3, device))
    names = [name for name, *_ in device.log]
    assert names[:5] == [
        "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
        "cuStreamCreateWithPriority",
    ]  # fmt: skip
    assert (device.log[0][1], device.log[1][2], device.log[2][2]) == (0, 3, 43)
    tables = [entry for entry in device.log if entry[0] == "cuMemcpyHtoDAsync_v2"]
    assert tables[0][3:] == (2 * 32, rows.driver.stream), "the table of two entries"
    assert names.index("cuMemcpyHtoDAsync_v2") < names.index("cuLaunchKernel")
    launched = [entry[1] for entry in device.log if entry[0] == "cuLaunchKernel"]
    assert set(launched) == {function for function, _ in rows._kernels.values()}
    assert len(set(launched)) == 5
    assert max(i for i, name in enumerate(names) if name.startswith("cuModule")) < names.index(
        "cuLaunchKernel"
    )
    loaded = [entry[2:] for entry in device.log if entry[0] == "cuModuleGetFunction"]
    assert [name for _, name in loaded] == [b"_move"] * 5
    assert [module for module, _ in loaded] == [1, 2, 3, 4, 5]


# ---------------------------------------------------------------- the channel


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make both sides of the channel, whose copies are kernels that end late.

    The tick is so long that it never decides a request.
    """
    monkeypatch.setattr(loop, "TICK", 60.0)

    def on_device(rows: DraftRows, staging: Staging) -> GpuRows:
        fake = FakeCuda(late=3)
        with fake.compiling():
            return GpuRows(rows, threads.PAGE, staging, fake.driver())

    monkeypatch.setattr(threads._Side, "device", staticmethod(on_device))
    with threads.Channel(Times(20)) as both:
        yield both


def test_concurrent_rooms_with_kernels_are_right_or_cold(
    channel: Any,
) -> None:
    channel.check_three_at_once()
    channel.decode.plane.damage = [64]
    assert channel.request(4) == ("cold", "stale")
    channel.decode.plane.damage = []
    assert channel.request(5) == ("warm", "")
    for side in channel.prefill, channel.decode:
        side.channel._queue.wake()  # otherwise the ends of requests would wait for the tick
    assert channel.at_rest()


@pytest.mark.parametrize(("failing", "found"), [("settle", "cold"), ("settle clear", "failed")])
def test_unchecked_rows_are_zeroed_before_the_verdict(
    channel: Any, failing: str, found: str
) -> None:
    """Rows whose check fails to run are zeroed before the request gets its verdict.

    The first launch has stored the rows, and the second one, which checks them, fails. If zeroing
    also fails, the request fails.
    """
    device, decode, stored = channel.decode.store.device, channel.decode, list[bool]()
    fake, real = device.driver.library, device.driver.library._cuLaunchKernel
    fails = [device._kernels[name][0] for name in failing.split()]

    def launch(function: int, *given: Any) -> int:
        if function == device._kernels["clear"][0]:
            stored.append(bool((decode.rows_of(handle) != threads.CANARY).any()))
        return LAUNCH_FAILED if function in fails else real(function, *given) or 0

    fake._cuLaunchKernel, decode.plane.damage = launch, [64]
    sent, handle = channel.prefill.send(1, threads.SEGMENT), channel.open(1, threads.SEGMENT)
    state, reason = channel.state(handle)
    assert (state, stored) == (found, [True])
    assert (reason == "unpack") == (found == "cold")
    assert decode.rows_of(handle).any() == (found == "failed")
    fake._cuLaunchKernel, decode.plane.damage = real, []
    channel.end(sent, handle)
    assert channel.request(2) == ("warm", "")


def test_requests_that_end_during_kernels_lose_no_slot(channel: Any) -> None:
    decode, prefill = channel.decode, channel.prefill
    for number in range(1, 12):
        handle, sent, unpacked = (
            channel.open(number, 64),
            prefill.send(number, 64),
            decode.notes.bytes,
        )
        threads.wait_for(
            lambda h=handle, n=unpacked: decode.notes.bytes > n or h.state, number / 100
        )
        decode.channel.close(handle, "aborted")
        rows = decode.rows_of(handle).copy()
        prefill.channel.end(sent, "aborted")
        assert (decode.rows_of(handle) == rows).all(), "rows were written after the request's end"
    assert threads.wait_for(lambda: not outstanding(decode.channel._machine))
    assert threads.wait_for(lambda: not outstanding(prefill.channel._machine).get("jobs"))
    assert not violations(prefill.channel._machine), outstanding(prefill.channel._machine)
    assert channel.request(99) == ("warm", "")
