"""Batches of draft/rows_gpu.py on a GPU: python scripts/bench/gpu_rows.py [--quick] [--json FILE]

It compares every byte. Microseconds are of a slot of 4 MiB, from the start of its batch until its
results are there: alone, beside a thread that launches kernels as SGLang's scheduler does, and
beside one of pure Python. `share`: the device's time for a copy of as many bytes, divided by its
time for the batch.
"""

import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import product
from statistics import median

import numpy as np
import torch
from common import options, show

from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.rows_gpu import gpu_rows
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

SLOT, BATCHES = 4 << 20, (1, 8, 16)
CASES = {  # layers, heads on the rank, heads wanted, bytes of a head, tokens of a page
    "EAGLE3 bf16, 8 of 8 heads, pages of 64": (1, 8, 8, 256, 64),
    "EAGLE3 fp8, 1 of 8 heads, pages of 1": (1, 8, 1, 128, 1),
    "DFLASH bf16, 4 of 8 heads, pages of 64": (6, 8, 4, 256, 64),
    "DSPARK bf16, 16 of 16 heads, pages of 64": (5, 16, 16, 256, 64),
}


def ended(ticket):
    while not ticket.done():
        pass
    assert set(ticket.results()) == {SlotCheck.OK}, ticket.error


class Scene:
    """Rows of a pool go through slots into the same pages of a pool with the wanted heads alone."""

    def __init__(self, case, slots, device):
        layers, held, wanted, width, page = case
        heads, tokens = range(held - wanted, held), (SLOT - HEADER) // (2 * layers * wanted * width)
        pages = -(-tokens * max(BATCHES) // page)
        make = {"dtype": torch.uint8, "device": device}
        pool = [torch.randint(256, (pages * page, held, width), **make) for _ in range(2 * layers)]
        sink = [torch.zeros(pages * page, wanted, width, **make) for _ in pool]
        staging, order = Staging(slots, SLOT, device), np.random.default_rng(3).permutation(pages)
        self.starts = {}
        for kind, entries, on in (("pack", pool, range(held)), ("unpack", sink, heads)):
            rows = gpu_rows(entries, on, page, staging)
            if isinstance(rows, str):
                raise SystemExit(rows)
            there = rows.pages(order)
            jobs = [rows.job(there, n * tokens, tokens, heads, n, n + 1) for n in range(slots)]
            self.starts[kind] = rows, partial(getattr(rows, f"start_{kind}"), jobs)
        for _, start in self.starts.values():
            ended(start())
        numbers = (order[:, None] * page + np.arange(page)).ravel()[: slots * tokens]
        for n, some in enumerate(np.split(numbers, slots)):
            found = DraftRows(sink, heads).verify(staging.slot(n), tokens, wanted, n + 1)
            used = torch.from_numpy(some).to(device)
            assert found is SlotCheck.OK, found
            for entry, target in zip(pool, sink, strict=True):
                assert torch.equal(entry[used][:, heads.start :], target[used]), "wrong bytes"
        flat = torch.empty(2, slots * SLOT, **make)
        self.copy = lambda: flat[0].copy_(flat[1])


def on_device(rows, start):
    """Seconds of the device for what `start` starts on the kernels' stream."""
    with torch.cuda.stream(torch.cuda.ExternalStream(rows.driver.stream)):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda._sleep(2_000_000)  # about 1 ms, in which the host starts all of it
        first.record()
        ticket = start()
        last.record()
    last.synchronize()
    if not isinstance(ticket, torch.Tensor):
        ended(ticket)
    return first.elapsed_time(last) / 1e3


@contextmanager
def beside(whom):
    stop, data = threading.Event(), torch.zeros(1 << 16, device="cuda")

    def work():
        while whom != "alone" and not stop.is_set():
            for _ in range(200 * (whom == "scheduler")):
                data.add_(1)
            torch.cuda.current_stream().synchronize() if whom == "scheduler" else sum(range(20_000))

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


def elapsed(start):
    began = time.perf_counter()
    ended(start())
    return time.perf_counter() - began


def main():
    arguments = options(__doc__ or "").parse_args()
    torch.cuda.set_device(0)
    count, found = range(arguments.repeats or (3 if arguments.quick else 15)), []
    for name, slots in product(list(CASES)[: 1 if arguments.quick else None], BATCHES):
        print(name, slots, file=sys.stderr)
        scene = Scene(CASES[name], slots, torch.device("cuda", 0))
        for kind, (rows, start) in scene.starts.items():
            copy, batch = (median(on_device(rows, w) for _ in count) for w in (scene.copy, start))
            record = {"case": name, "slots": slots, "kind": kind, "share": copy / batch}
            for whom in ("alone", "scheduler", "python"):
                with beside(whom):
                    seconds = median(elapsed(start) for _ in count)
                record[f"{whom} us"] = seconds / slots * 1e6
            found.append(record)
    show(arguments, {f"rows on {torch.cuda.get_device_name(0)}": found})


if __name__ == "__main__":
    main()
