"""Time the plugin's copies, in microseconds per slot of 4 MiB.

    alone       synchronous calls: one slot with torch's copy, `batch` slots with the kernels
    python      while another thread computes in Python, including waits for the GIL
    launches    while another thread launches kernels, as SGLang's scheduler does
    copy        a synchronous plain copy of as many bytes on the device
    device      the time on the GPU itself, by torch's profiler; device_copy: of the plain copy
    share       device_copy / device

The tests set no limits for these figures. On the CPU they only test this module.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_mixkv.draft.rows import Staging
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

from .copies import WAYS, Request
from .pools import DSPARK, EAGLE3, HEAD, SLOT, Drafter, beside, pool, rows_of

COUNT, PAGE, TIMES = {"cuda": 48, "cpu": 2}, 64, 5
BATCHES = {"Torch": (1,), "Kernels": (1, 8, 48)}


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
    cuts = [range(n * step, n * step + step) for n in range(count)]
    other = torch.empty_like(slots.slot(0))

    def copy() -> None:
        for number in range(count):
            other.copy_(slots.slot(number))
            if device.type == "cuda":
                torch.cuda.synchronize()

    def us(work: Callable[[], None], times: int = TIMES) -> float:
        """Return the median time per slot, excluding the first run."""
        taken = []
        for _ in range(times + 1):
            begin = time.perf_counter()
            work()
            taken.append((time.perf_counter() - begin) / count * 1e6)
        return float(np.median(taken[-times:]))

    def busy(work: Callable[[], None]) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            us(work, 0)
        return sum(one.self_device_time_total for one in profile.key_averages()) / count

    small = torch.zeros(1 << 16, device=device)
    ways = [(way, batch) for way in WAYS[device.type] for batch in BATCHES[way.__name__]]
    for way, batch in ways:
        copies = way(entries, range(drafter.heads), PAGE, slots)
        firsts = range(0, count, batch)
        requests = [Request(numbers, heads, cuts[n : n + batch], n) for n in firsts]

        def pack(copies: Any = copies, requests: list[Request] = requests) -> None:
            for request in requests:
                copies.pack(request)

        def unpack(copies: Any = copies, requests: list[Request] = requests) -> None:
            for request in requests:
                assert set(copies.unpack(request)) == {SlotCheck.OK}

        for work in (pack, unpack):
            record = {"way": way.__name__, "batch": batch, "copies": work.__name__}
            record |= {"alone": us(work), "copy": us(copy)}
            with beside(lambda: sum(range(10_000))):
                record["python"] = us(work, 1)
            with beside(lambda: small.add_(1)):
                record["launches"] = us(work, 1)
            if device.type == "cuda":
                record |= {"device": busy(work), "device_copy": busy(copy)}
                record["share"] = record["device_copy"] / record["device"]
            figures(**record)


def test_figures_are_written(tmp_path: Path) -> None:
    """--figures writes the records of the tests that ran, and a description of the machine."""
    file = tmp_path / "figures.json"
    chosen = ["-k", "timed and cpu and EAGLE3 and True", "--figures", str(file)]
    subprocess.run([sys.executable, "-m", "pytest", __file__, *chosen], check=True)
    found = json.loads(file.read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert [one["copies"] for one in found["figures"]] == ["pack", "unpack"]
    assert all(one["alone"] > 0 and "EAGLE3" in one["test"] for one in found["figures"])
