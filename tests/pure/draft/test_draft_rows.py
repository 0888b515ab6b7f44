"""Packing, unpacking and clearing rows of the draft pool, compared with plain loops.

The tests run numpy's copies, and torch's copies for a GPU on host memory. A GPU's streams are
mocked, and its memory is not tested here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sglang_mixkv.draft import rows as rows_module  # noqa: E402
from sglang_mixkv.draft.rows import DraftRows, Staging, own_stream  # noqa: E402
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck  # noqa: E402

CPU = torch.device("cpu")
CANARY = 0xEE
STAMP = 0xFEDCBA9876543210
MASK = (1 << 64) - 1

by_numpy = pytest.mark.parametrize("by_numpy", [True, False], ids=["numpy", "torch"])


def pool_of(widths: list[int], heads: int, num_rows: int, kind: str, seed: int) -> list:
    """Return the K entries of all layers, then V, each [rows, heads, head size].

    This is the order of MHATokenToKVPool. With an odd seed, each entry starts at an odd address.
    The first entry has one more row, which belongs to no request.
    """
    dtype = {"bf16": torch.bfloat16, "fp8": torch.uint8}[kind]
    noise, entries = np.random.default_rng(seed), []
    for number, width in enumerate(np.repeat(widths, 2).tolist()):
        shape = num_rows + (number == 0), heads, width
        memory = torch.from_numpy(noise.integers(0, 256, math.prod(shape) + 2, np.uint8))
        memory = memory[seed % 2 * dtype.itemsize :]
        entries.append(memory[: math.prod(shape)].view(dtype).view(*shape[:2], -1))
    return entries


def bytes_of(entries: list) -> list[np.ndarray]:
    return [entry.view(torch.uint8).numpy() for entry in entries]


def cells(entries: list, rows: np.ndarray, heads: range) -> Iterator[np.ndarray]:
    """Yield the bytes of each head of these rows, in the order of a payload.

    `heads`: the heads' positions on this rank.
    """
    for entry in bytes_of(entries):
        for row in rows.tolist():
            for head in heads:
                yield entry[row, head]


def payload_of(entries: list, rows: np.ndarray, heads: range) -> bytes:
    return b"".join(cell.tobytes() for cell in cells(entries, rows, heads))


def all_bytes(entries: list) -> bytes:
    return b"".join(entry.tobytes() for entry in bytes_of(entries))


class Segment(NamedTuple):
    """Some heads of one request, copied from a rank with heads `source` to one with `target`."""

    widths: list[int]
    kind: str
    tokens: int
    source: range
    target: range
    heads: range
    seed: int

    def pool(self, held: range, seed: int) -> list:
        return pool_of(self.widths, len(held), self.tokens + 3, self.kind, self.seed + seed)

    def rows(self, seed: int) -> np.ndarray:
        return np.random.default_rng([self.seed, seed]).permutation(self.tokens + 3)[: self.tokens]

    def on(self, held: range) -> range:
        return range(self.heads.start - held.start, self.heads.stop - held.start)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    kind = draw(st.sampled_from(["bf16", "fp8"]))
    widths = st.sampled_from([2, 4, 6, 8, 16, 48] if kind == "bf16" else [1, 2, 3, 6, 8, 32])
    start, stop = sorted(draw(st.lists(st.integers(0, 8), min_size=2, max_size=2, unique=True)))
    held = [range(draw(st.integers(0, start)), draw(st.integers(stop, 8))) for _ in range(2)]
    sizes = [draw(widths), draw(widths)], kind, draw(st.integers(0, 133))
    return Segment(*sizes, *held, range(start, stop), draw(st.integers(0, 99)))


def summed(payload: bytes, stamp: int) -> int:
    """Return the checksum that slot_format.py describes, computed with plain loops."""

    def weight(place: int) -> int:
        found = (place + 1) * 0x9E3779B97F4A7C15 & MASK
        found = (found ^ found >> 32) * 0xD6E8FEB86659FD93 & MASK
        return (found ^ found >> 32) | 1

    padded = payload + bytes(-len(payload) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    total = sum(word * weight(place) for place, word in enumerate(words))
    return (total + stamp * 0x2545F4914F6CDD1D) & MASK


def canary_slot(size: int) -> torch.Tensor:
    slot = Staging(1, -(-size // 64) * 64 + 64, CPU).slot(0)
    slot.fill_(CANARY)
    return slot


@by_numpy
@settings(max_examples=80)
@given(case=segments(), bit=st.integers(0, 7), data=st.data())
def test_a_segment_changes_only_its_slot_and_its_rows(
    by_numpy: bool, case: Segment, bit: int, data: st.DataObject
) -> None:
    """A segment changes only its own slot and rows, with the same result as plain loops.

    A slot with another stamp or any flipped bit is rejected without a write. Changes of unused
    bytes in a slot have no effect. Cleared rows are zeros.
    """
    source, target = case.pool(case.source, 0), case.pool(case.target, 1)
    there, here = DraftRows(source, case.source, by_numpy), DraftRows(target, case.target, by_numpy)
    payload, before = payload_of(source, case.rows(0), case.on(case.source)), all_bytes(source)
    size = there.packed_bytes(case.tokens, len(case.heads))
    slot = canary_slot(size)
    there.pack(case.rows(0), case.heads, slot, STAMP)
    header = b"".join(n.to_bytes(8, "little") for n in (STAMP, summed(payload, STAMP)))
    canary = bytes([CANARY])
    expected = header + canary * (HEADER - 16) + payload + bytes(-len(payload) % 8)
    assert size == len(expected)
    assert slot.numpy().tobytes() == expected + canary * (slot.numel() - size)
    assert all_bytes(source) == before

    rows, heads, rest = case.rows(1), case.on(case.target), np.frombuffer(payload, np.uint8)
    before, wanted = all_bytes(target), [entry.clone() for entry in target]
    for cell in cells(wanted, rows, heads):
        cell[:], rest = rest[: len(cell)], rest[len(cell) :]
    assert here.unpack(rows, case.heads, slot, STAMP + 1) is SlotCheck.STALE
    place = data.draw(st.sampled_from([*range(16), *range(HEADER, size)]))
    slot[place] ^= 1 << bit
    wrong = SlotCheck.STALE if place < 8 else SlotCheck.DIFFERS
    assert here.unpack(rows, case.heads, slot, STAMP) is wrong
    slot[place] ^= 1 << bit
    assert all_bytes(target) == before
    slot[16:HEADER], slot[size:] = 1, 2
    packed = slot.clone()
    assert here.unpack(rows, case.heads, slot, STAMP) is SlotCheck.OK
    assert all_bytes(target) == all_bytes(wanted)
    assert torch.equal(slot, packed)

    for cell in cells(wanted, rows, range(len(case.target))):
        cell[:] = 0
    here.clear(rows)
    assert all_bytes(target) == all_bytes(wanted)


def draft_of(by_numpy: bool) -> DraftRows:
    return DraftRows(pool_of([6, 1], 4, 32, "fp8", 5), range(4, 8), by_numpy)


# ---------------------------------------------------------------- bounds

ROWS, HEADS = np.arange(3, dtype=np.int32), range(5, 7)  # int32 is the type of a page table
FITS = HEADER + 3 * 2 * 14 + 4  # bytes: 3 tokens of 2 heads, padded
OUTSIDE = {
    "a negative row": (np.array([0, -1, 2], np.int32), HEADS, FITS),
    "a row after the last": (np.array([0, 32, 2], np.int32), HEADS, FITS),
    "a head before the first": (ROWS, range(3, 5), FITS),
    "a head after the last": (ROWS, range(7, 9), FITS),
    "no heads": (ROWS, range(5, 5), FITS),
    "every second head": (ROWS, range(4, 8, 2), FITS),
    "a slot that is one byte too small": (ROWS, HEADS, FITS - 1),
}


@by_numpy
@pytest.mark.parametrize("case", OUTSIDE.values(), ids=OUTSIDE)
def test_rows_heads_and_slots_outside_are_rejected(by_numpy: bool, case: tuple) -> None:
    rows, heads, size = case
    draft, slot = draft_of(by_numpy), canary_slot(512)[:size]
    pools = [np.array(pool) for pool in draft._pools]
    for call in (draft.pack, draft.unpack, lambda rows, *_: draft.clear(rows)):
        if call in (draft.pack, draft.unpack) or rows is not ROWS:
            with pytest.raises(ValueError, match=r"expected|rows|slot"):
                call(rows, heads, slot, STAMP)
    assert set(slot.tolist()) == {CANARY}
    assert all(map(np.array_equal, draft._pools, pools))
    draft.pack(ROWS, HEADS, canary_slot(512)[:FITS], STAMP)  # all inside, so this must not raise


@pytest.mark.parametrize("wrong", ["heads", "strides"])
def test_entries_of_another_layout_are_refused(wrong: str) -> None:
    entries = pool_of([4, 8], 4, 16, "bf16", 0)
    if wrong == "strides":
        entries[1] = entries[1].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="expected heads"):
        DraftRows(entries, range(4) if wrong == "strides" else range(2))


@pytest.mark.parametrize(
    ("widths", "skipped", "word"),
    [
        ([16, 8], 0, torch.int64), ([16, 12], 0, torch.int32), ([6], 0, torch.int16),
        ([8, 7], 0, torch.uint8), ([7], 0, torch.uint8), ([16], 4, torch.int32),
        ([16], 2, torch.int16), ([16], 1, torch.uint8),
    ],
)  # fmt: skip
def test_a_gpu_copies_the_widest_possible_words(
    widths: list[int], skipped: int, word: torch.dtype
) -> None:
    """A GPU copies the widest words that divide all heads and to which all heads are aligned.

    Copying single bytes would take several times as long.
    """
    memory = [torch.zeros(4 * width + 8, dtype=torch.uint8) for width in widths]
    entries = [m[skipped:][: 4 * w].view(2, 2, w) for m, w in zip(memory, widths, strict=True)]
    assert DraftRows(entries, range(2), by_numpy=False)._word == word


# ---------------------------------------------------------------- memory


def test_a_staging_buffer_has_adjacent_equal_slots() -> None:
    staging = Staging(3, 128, CPU)
    assert staging.size == 384
    for number in range(3):
        slot = staging.slot(number)
        assert (slot.data_ptr(), slot.numel()) == (staging.address + 128 * number, 128)
        assert not slot.any()
        slot.fill_(1)
    for number in (-1, 3):
        with pytest.raises(ValueError, match="slot"):
            staging.slot(number)
    assert [Staging(count, 64, CPU).size for count in (1, 2)] == [64, 128]


@pytest.mark.parametrize("fails", [False, True])
def test_gpu_work_runs_on_the_threads_own_stream(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, device = mock.MagicMock(), torch.device("cuda", 1)
    monkeypatch.setattr(rows_module, "_own", threading.local())
    monkeypatch.setattr(torch.cuda, "Stream", cuda.Stream)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    cuda.stream.return_value.__exit__.return_value = False
    cuda.Stream.return_value.query.side_effect = [False, True] * 2
    cuda.work.side_effect = RuntimeError("out of memory") if fails else None
    for _ in range(2):
        error = pytest.raises(RuntimeError) if fails else nullcontext()
        with error, own_stream(device):
            assert torch.is_inference_mode_enabled()
            cuda.work()
    begin, end = ["stream", "stream().__enter__", "work"], ["Stream().query"] * 2
    once = [*begin, *end, "stream().__exit__"]
    assert [name for name, *_ in cuda.mock_calls] == ["Stream", *once, *once]
    cuda.Stream.assert_called_once_with(device, priority=-1)
    cuda.stream.assert_called_with(cuda.Stream())


def test_staging_uses_the_memory_pool_of_the_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "use_mem_pool", seen.use)
    monkeypatch.setattr(torch, "zeros", seen.zeros)
    Staging(1, 64, CPU, pool="pool")
    names = [name for name, *_ in seen.mock_calls[:4]]
    assert names == ["use", "use().__enter__", "zeros", "use().__exit__"]
    seen.use.assert_called_once_with("pool")


def test_staging_on_a_gpu_is_not_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA GPU, the staging buffer is allocated by the driver, not by torch.

    Torch's memory may lie in segments that a transport cannot register. HIP uses torch's memory.
    """
    made = list[Any]()

    def memory(size: int, driver: int) -> Any:
        made.append((driver, np.ones(size, np.uint8)))
        return made[-1][1]

    monkeypatch.setattr(rows_module, "stream_of", lambda _: nullcontext())
    monkeypatch.setattr(rows_module, "Driver", lambda index: index)
    monkeypatch.setattr(rows_module, "DeviceMemory", memory)
    staging = Staging(2, 64, torch.device("cuda", 3))
    ((driver, where),) = made
    assert (driver, len(where), where.any()) == (3, 128, False)
    assert (staging.address, staging.size) == (where.ctypes.data, 128)
    zeros = mock.Mock(return_value=torch.ones(128))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch, "zeros", zeros)
    Staging(2, 64, torch.device("cuda", 3))
    assert len(made) == zeros.call_count == 1


def test_writes_by_a_nic_are_flushed_before_unpacking() -> None:
    """Writes by a NIC are flushed before a slot is unpacked.

    On a GPU that does not order these writes, the slot's bytes may arrive as late as the flush.
    """
    rows = DraftRows([torch.zeros(4, 1, 8, dtype=torch.uint8)], range(1))
    source, slot = (
        DraftRows([torch.ones(4, 1, 8, dtype=torch.uint8)], range(1)),
        Staging(1, 128, CPU),
    )
    arrived = torch.zeros(128, dtype=torch.uint8)
    source.pack(np.arange(4), range(1), arrived, 7)
    rows.flush = lambda: slot.slot(0).copy_(arrived)
    assert rows.unpack(np.arange(4), range(1), slot.slot(0), 7) is SlotCheck.OK
    assert rows.entries[0].all()


def test_a_thread_uses_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_device` sets the device of the calling thread, which is device 0 by default."""
    taken = list[object]()
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(rows_module, "spare_captures", lambda: taken.append("spares captures"))
    rows = DraftRows([torch.zeros(1, 1, 8, dtype=torch.uint8)], range(1))
    rows.use_device()
    assert taken == []
    assert isinstance(rows._pools[0], np.ndarray), "numpy is twice as fast in host memory"
    rows.device = torch.device("cuda", 3)
    rows.use_device()
    assert taken == [rows.device, "spares captures"]
