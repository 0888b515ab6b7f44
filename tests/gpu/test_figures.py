"""How long the product's copies take, in microseconds a slot of 4 MiB.

    alone       whole calls: torch's take one slot after the other, the kernels one batch of all
    python      beside a thread that computes in Python: each wait for the GIL counts
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

from sglang_mixkv.draft.rows import Staging
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

from .copies import WAYS, Request
from .pools import DSPARK, EAGLE3, HEAD, SLOT, Drafter, pool, rows_of

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
    step = (SLOT[device.type] - HEADER) // (2 * drafter.layers * len(heads) * 2 * HEAD)  # tokens
    numbers, held = rows_of(count * step, PAGE), -(-count * step // PAGE) * PAGE
    entries = pool(drafter.layers, drafter.heads, held, "bf16", device)
    slots = Staging(count, SLOT[device.type], device)
    request = Request(numbers, heads, [range(n * step, n * step + step) for n in range(count)])
    other = torch.empty_like(slots.slot(0))

    def copy() -> None:
        for number in range(count):
            other.copy_(slots.slot(number))
            if device.type == "cuda":
                torch.cuda.synchronize()

    def us(work: Callable[[], None], times: int = TIMES) -> float:
        """The median; the first time is not counted."""
        taken = []
        for _ in range(times + 1):
            begin = time.perf_counter()
            work()
            taken.append((time.perf_counter() - begin) / count * 1e6)
        return float(np.median(taken[-times:]))

    small, activities = torch.zeros(1 << 16, device=device), [torch.profiler.ProfilerActivity.CUDA]
    for way in WAYS[device.type]:
        copies = way(entries, range(drafter.heads), PAGE, slots)

        def pack(copies: Any = copies) -> None:
            copies.pack(request)

        def unpack(copies: Any = copies) -> None:
            assert set(copies.unpack(request)) == {SlotCheck.OK}

        for work in (pack, unpack):
            record = {"way": way.__name__, "copies": work.__name__, "alone": us(work)}
            record["copy"] = us(copy)
            with beside(lambda: sum(range(10_000))):
                record["python"] = us(work, 1)
            with beside(lambda: small.add_(1)):
                record["launches"] = us(work, 1)
            if device.type == "cuda":
                with torch.profiler.profile(activities=activities) as profile:
                    us(work, 0)
                seen = profile.key_averages()
                record["device"] = sum(one.self_device_time_total for one in seen) / count
            figures(**record)
