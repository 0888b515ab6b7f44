"""Planning of one chunk: SGLang's own against the product's, nothing sent.

Stock is the installed SGLang: MooncakeKVManager._send_kvcache_generic, which groups pages with
group_concurrent_contiguous and builds its lists, over an engine that only counts. The
product is `blocks` and the lists that the transport takes, over an engine that only
counts, too. 62 entries (61 of the target, one of the drafter), 2,048 pages.
"""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import Check, Record, Result, elapsed, interleave, options, repeats

from sglang_mixkv import cpu
from sglang_mixkv.kv.plan import Copies, Ints
from sglang_mixkv.kv.ranges import blocks
from sglang_mixkv.transport.mooncake import Engines, InFlight, Mooncake

ENTRIES, PAGES, PAGE_SIZE, ROW = 62, 2048, 64, 1152
POOL = 2 * PAGES
LEAST_SPEEDUP = 8.0
CHUNK_LIMIT_S = 0.5e-3


class Counter:
    """An engine that takes ranges and only counts them; bytes too while `careful`."""

    def __init__(self) -> None:
        self.ranges, self.bytes, self.careful = 0, 0, False

    def batch_transfer_sync(
        self, session: str, src: list[int], dst: list[int], lengths: list[int]
    ) -> int:
        self.ranges += len(lengths)
        self.bytes += sum(lengths) if self.careful else 0
        return 0


def stock_manager(engine: Counter) -> Any:
    """SGLang's manager with what its planning reads, and nothing started."""
    os.environ.update(cpu.launch_env(), CUDA_VISIBLE_DEVICES="")
    sys.path.insert(0, str(cpu.SITE))
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    manager = object.__new__(MooncakeKVManager)
    manager.engine = engine
    manager.is_mla_backend, manager.is_hybrid_mla_backend = True, False
    manager.enable_custom_mem_pool, manager.custom_mem_pool_type = False, None
    manager.max_transfer_batch_indices, manager.pp_size = 0, 1
    manager.kv_args = SimpleNamespace(prefill_start_layer=0, prefill_end_layer=ENTRIES)
    return manager


def pages_of(layout: str, pages: int) -> tuple[Ints, Ints]:
    """Source and destination pages: all random, or runs of 16 in random order."""
    run = 1 if layout == "random" else 16
    sides = []
    for seed in (1, 2):
        starts = np.random.default_rng(seed).permutation(POOL // run)[: pages // run] * run
        sides.append((starts[:, None] + np.arange(run)).ravel().astype(np.int64))
    return sides[0], sides[1]


def bases(entries: int) -> list[int]:
    """Addresses as long as real ones: the lists hold objects, not small cached numbers."""
    return [0x7F00_0000_0000 + i * POOL * PAGE_SIZE * ROW for i in range(entries)]


def whole_copies(entries: int) -> Copies:
    row, zero = np.full(entries, ROW), np.zeros(entries, np.int64)
    at = np.array(bases(entries), np.int64)
    return Copies(at, at, row, row, zero, zero, row)


def methods(layout: str, pages: int, engine: Counter, manager: Any) -> dict[str, Any]:
    """Each way to get from pages to lists. `plan only`: without handing them over."""
    src, dst = pages_of(layout, pages)
    stock_src, stock_dst = src.astype(np.int32), dst.astype(np.int32)
    pointers, items = bases(ENTRIES), [PAGE_SIZE * ROW] * ENTRIES
    copies, transport = whole_copies(ENTRIES), Mooncake(Engines(engine, Counter), InFlight())
    return {
        "stock": lambda: manager._send_kvcache_generic(
            "session", pointers, pointers, items, stock_src, stock_dst, None
        ),
        "product": lambda: transport.wait(
            transport.write("session", blocks(copies, PAGE_SIZE, src, dst))
        ),
        "product, ranges only": lambda: blocks(copies, PAGE_SIZE, src, dst),
    }


def measure(layout: str, pages: int, manager: Any, engine: Counter, count: int) -> list[Record]:
    """One record a method; raises RuntimeError unless both send the same bytes in as many."""
    found = methods(layout, pages, engine, manager)
    _same(found, engine)
    samples = interleave({name: _timer(call) for name, call in found.items()}, count)
    stock = float(np.median(samples["stock"].total))
    return [
        {"layout": layout, "entries": ENTRIES, "pages": pages, "method": name, **taken.record(),
         "times_cheaper": stock / float(np.median(taken.total))}
        for name, taken in samples.items()
    ]  # fmt: skip


def _timer(call: Any) -> Any:
    return lambda samples: samples.add(elapsed(call))


def _same(found: dict[str, Any], engine: Counter) -> None:
    totals = []
    engine.careful = True
    for name in ("stock", "product"):
        engine.ranges = engine.bytes = 0
        found[name]()
        totals.append((engine.ranges, engine.bytes))
    engine.careful = False
    if totals[0] != totals[1]:
        raise RuntimeError(f"(ranges, bytes) of stock and product differ: {totals}")


def checks(records: list[Record]) -> list[Check]:
    value = {(r["layout"], r["method"]): r for r in records}
    return [
        Check("planning of random pages, times cheaper than stock", LEAST_SPEEDUP,
              value["random", "product"]["times_cheaper"], at_most=False),
        Check("planning of a chunk in runs of 16, ms", CHUNK_LIMIT_S * 1e3,
              value["runs of 16", "product"]["median"] * 1e3),
    ]  # fmt: skip


def plot(result: Result, pyplot: Any) -> None:
    records = result.parts["chunk"]
    labels = [f"{r['layout']}\n{r['method']}" for r in records]
    pyplot.figure(figsize=(9, 4))
    pyplot.bar(labels, [r["median"] * 1e3 for r in records])
    pyplot.yscale("log")
    pyplot.ylabel("ms per chunk")


def main() -> None:
    arguments = options((__doc__ or "").splitlines()[0]).parse_args()
    engine = Counter()
    manager = stock_manager(engine)
    result = Result("planning", arguments.quick, {"chunk": []})
    pages, count = (256 if arguments.quick else PAGES), repeats(arguments, 21)
    gc.disable()
    for layout in ("random", "runs of 16"):
        result.parts["chunk"] += measure(layout, pages, manager, engine, count)
    result.checks = checks(result.parts["chunk"])
    result.finish(arguments, lambda pyplot: plot(result, pyplot))


if __name__ == "__main__":
    main()
