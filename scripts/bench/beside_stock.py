"""Measure what a drafter adds to a transfer, in the plugin's channel and in SGLang's own transfer.

The TP sizes are equal, so both transfers are correct. Three rings take turns: `stock` and `channel`
have a drafter, and `target` is stock without one. The figures of `target` are subtracted, so the
channel's row includes all costs of the plugin. Each side is one rank of TP 8, with the draft rows
of Kimi-K2's EAGLE3 head (1 layer, 8 of 64 heads, 4 KiB per token) or a DSPARK drafter (5 layers, 2
of 16 heads, 2.5 KiB). The target has one layer of 24 bytes. A request is one chunk.

`descriptors`, `bytes`: the sums over all calls into the transfer engines. `CPU ms`: the time of the
threads that post and poll and of the engines' threads, without the main thread, in which the
benchmark polls. `copy ms`: the time of the threads that pack and unpack, or of kernels on a GPU.
`ms`: from `send` until decode polls Success. A failed transfer has no figures.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import sys
import threading
import time
from typing import Any

import rings
from common import Record, options, show

Cache = rings.model.Cache
DRAFTERS = {
    "EAGLE3": Cache("mha", layers=1, heads=8, k_bytes=256, v_bytes=256),
    "DSPARK": Cache("mha", layers=5, heads=2, k_bytes=128, v_bytes=128),
}
TOKENS, PAGES, BACKENDS = (1 << 10, 8 << 10, 32 << 10), (1, 16, 64), ("mooncake", "nixl")
WAYS = ("stock", "channel", "target")
COUNTED = ("descriptors", "bytes", "CPU ms", "copy ms", "ms")
COPIERS = "mixkv-pack", "mixkv-unpack"
SETTLE_S = 0.05  # time for the last messages and slots

counted = {"descriptors": 0, "bytes": 0}  # in a rank's process


def count(rank: Any) -> None:
    """Wrap the transfer engines' calls in a rank's process, before its manager is made."""

    def wrap(owner: Any, name: str, sizes: Any) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            descriptors, size = sizes(*args)
            counted["descriptors"] += descriptors
            counted["bytes"] += size
            return original(self, *args, **kwargs)

        setattr(owner, name, call)

    def batch(_peer: str, _here: Any, _there: Any, lengths: list[int]) -> tuple[int, int]:
        return len(lengths), sum(lengths)

    def prepared(_operation: str, _here: Any, pages: Any, *_: Any) -> tuple[int, int]:
        widths = rank.manager.kv_args.kv_item_lens  # SGLang sends each page of each entry
        return len(pages), len(pages) // len(widths) * sum(widths)

    def listed(_operation: str, here: Any, *_: Any) -> tuple[int, int]:
        return here.descCount(), sum(here[i][1] for i in range(here.descCount()))

    if rank.case.backend == "mooncake":
        from mooncake.engine import TransferEngine

        wrap(TransferEngine, "batch_transfer_sync_write", batch)
        wrap(TransferEngine, "batch_transfer_async_read", batch)
    else:
        from nixl._api import nixl_agent

        wrap(nixl_agent, "make_prepped_xfer", prepared)
        wrap(nixl_agent, "initialize_xfer", listed)


def spent(_: Any) -> dict[str, float]:
    """Return this rank's counts, and its threads' CPU time."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    times = {"CPU ms": 0.0, "copy ms": 0.0}
    for number in map(int, os.listdir("/proc/self/task")):
        if number != os.getpid():
            of = "copy ms" if names.get(number) in COPIERS else "CPU ms"
            with contextlib.suppress(OSError):  # a thread that has ended
                times[of] += time.clock_gettime(~number << 3 | 6) * 1e3  # pthread_getcpuclockid
    return {**counted, **times}


def turn(ring: Any, tokens: int, layout: str) -> dict[str, float]:
    """Run one request, and return its counts and times over all ranks."""

    def total() -> dict[str, float]:
        found = [one for side in rings.SIDES for one in ring.ask(side, spent)]
        return {name: sum(one[name] for one in found) for name in COUNTED[:-1]}

    ring.open(tokens, layout)
    before = total()
    began, ended = ring.send(rings.DecodeMember.conclude)
    time.sleep(SETTLE_S)
    after = total()
    ring.clear()
    return {"ms": (ended - began) * 1e3, **{name: after[name] - before[name] for name in before}}


def measure(made: Any, tokens: int, layout: str, turns: int) -> dict[str, list[dict[str, float]]]:
    """Return the turns of each way whose transfers do not fail. All bytes are compared first."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in made}
    order = random.Random(tokens)
    for number in range(turns + 1):
        for way in order.sample([*found], len(found)):
            try:
                if number:
                    found[way].append(turn(made[way], tokens, layout))
                else:
                    made[way].check(tokens, layout)
            except rings.TransferFailed:
                del found[way]
                made[way].close()  # SGLang may reject a peer after a failure
                made[way].start()
    return found


def rows(arguments: argparse.Namespace, backend: str, drafter: str, page: int) -> list[Record]:
    sizes = TOKENS[:1] if arguments.quick else TOKENS
    turns = arguments.repeats or (1 if arguments.quick else 11)
    os.environ["SGLANG_MIXKV_DATA_PLANE"] = backend  # the default without RDMA is Mooncake
    counting = rings.special.Special(
        before=dict.fromkeys([(side, 0) for side in rings.SIDES], count)
    )
    given = {"draft": DRAFTERS[drafter], "page_size": page, "backend": backend, "special": counting}
    found = list[Record]()
    with rings.rings(WAYS, 1, 1, max(sizes), **given) as ways:
        for tokens, layout in itertools.product(sizes, rings.LAYOUTS):
            print(backend, drafter, page, tokens, layout, file=sys.stderr)
            made = measure(ways, tokens, layout, turns)
            record: Record = {"drafter": drafter, "page": page, "pages": layout, "tokens": tokens}
            for name, way in itertools.product(COUNTED, WAYS[:2]):
                record[f"{name}: {way}"] = _added(made, way, name)
            del record["copy ms: stock"]
            if len(made) == len(WAYS):
                pairs = zip(made["channel"], made["stock"], strict=True)
                record["whole ms, ratio"] = statistics.median(a["ms"] / b["ms"] for a, b in pairs)
            found.append(record)
    return found


def _added(made: dict[str, list[dict[str, float]]], way: str, name: str) -> float | str:
    """Return the median, over all turns, of the difference between a way and `target`."""
    if way not in made or "target" not in made:
        return "fails"
    turns = zip(made[way], made["target"], strict=True)
    return statistics.median(one[name] - alone[name] for one, alone in turns)


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    rings.load_sglang()
    cases = [*itertools.product(DRAFTERS, PAGES)][:: 5 if arguments.quick else 1]
    show(arguments, {
        backend: [row for case in cases for row in rows(arguments, backend, *case)]
        for backend in BACKENDS
    })  # fmt: skip


if __name__ == "__main__":
    main()
