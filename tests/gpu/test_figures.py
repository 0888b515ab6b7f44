"""How long the product's copies take, in microseconds a slot of 4 MiB.

    alone       whole calls, one slot after the other
    python      beside a thread that computes in Python: each return waits for the GIL
    launches    beside a thread that launches kernels, as SGLang's scheduler does
    device      what the GPU itself is busy with, by torch's profiler
    copy        a copy of as many bytes on the device, waited for

These are figures to look at; nothing is judged. On the CPU they show that this runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from sglang_mixkv.draft.rows import DraftRows, Staging

from .pools import DSPARK, EAGLE3, SLOT, STAMP, Drafter, pool, rows_of

COUNT, PAGE, TIMES = {"cuda": 48, "cpu": 2}, 64, 5


@contextmanager
def beside(work: Callable[[], Any]) -> Iterator[None]:
    """A thread that does this again and again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.parametrize("all_heads", [True, False])
@pytest.mark.parametrize("drafter", [EAGLE3, DSPARK], ids=str)
def test_copies_are_timed(
    device: torch.device, drafter: Drafter, all_heads: bool, figures: Callable[..., None]
) -> None:
    count, heads = COUNT[device.type], range(drafter.heads)[-drafter.heads if all_heads else -1 :]
    step = (SLOT[device.type] - 128) // (2 * drafter.layers * len(heads) * 256)  # tokens
    numbers = rows_of(count * step // PAGE * PAGE, PAGE)
    entries = pool(drafter.layers, drafter.heads, len(numbers), "bf16", device)
    rows = DraftRows(entries, range(drafter.heads), by_numpy=False)
    slots, parts = Staging(count, SLOT[device.type], device), np.array_split(numbers, count)
    other = torch.empty_like(slots.slot(0))

    def pack(part: Any, slot: Any) -> None:
        rows.pack(part, heads, slot, STAMP)
        rows.checksum(slot, len(part), len(heads))

    def unpack(part: Any, slot: Any) -> None:
        assert rows.stamps(slot, len(part), len(heads)) == (STAMP, STAMP)
        rows.checksum(slot, len(part), len(heads))
        rows.unpack(part, heads, slot)

    def copy(_: Any, slot: Any) -> None:
        other.copy_(slot)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def us(work: Callable[[Any, Any], None], times: int = TIMES) -> float:
        """The median; the first time is not counted."""
        taken = []
        for _ in range(times + 1):
            begin = time.perf_counter()
            for number, part in enumerate(parts):
                work(part, slots.slot(number))
            taken.append((time.perf_counter() - begin) / count * 1e6)
        return float(np.median(taken[-times:]))

    small, activities = torch.zeros(1 << 16, device=device), [torch.profiler.ProfilerActivity.CUDA]
    for work in (pack, unpack):
        record = {"copies": work.__name__, "alone": us(work), "copy": us(copy)}
        with beside(lambda: sum(range(10_000))):
            record["python"] = us(work, 1)
        with beside(lambda: small.add_(1)):
            record["launches"] = us(work, 1)
        if device.type == "cuda":
            with torch.profiler.profile(activities=activities) as profile:
                us(work, 0)
            seen = profile.key_averages()
            record["device"] = sum(event.self_device_time_total for event in seen) / count
        figures(**record)
