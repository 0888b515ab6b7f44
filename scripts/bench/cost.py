"""What draft KV costs, a + b x bytes: the channel beside a bare read, in turns.

    channel          from prefill's `send` until the draft KV is in place on all decode ranks
    channel, whole   from there until SGLang's poll says Success: the target's transfer beside it
    unchecked        the channel with `--mixkv-verify off`, and as whole
    bare             one read of as many bytes by one engine from one peer: Mooncake's
                     transfer_sync_read, or a NIXL agent's, asked for its state without a rest

The request is one chunk, and all ranks know it when `send` is called. The target has 24 bytes a
token, the drafter 4 KiB (one layer of K and V, 8 heads of 256 bytes), over all its ranks. A line's
intervals are those of samples drawn anew within each size.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import rings
from common import (
    DRAWS,
    Check,
    Record,
    Result,
    Samples,
    interleave,
    interval,
    line,
    options,
    ratio,
    repeats,
)  # fmt: skip
from members import LIMIT_S, LOOK_S
from reads import BARE, serve, truth

WAYS = ("channel", "unchecked")
DIRECTIONS = ((2, 1), (1, 2))
BACKENDS = ("mooncake", "nixl")
TOKENS = tuple(64 << step for step in range(10))  # 0.25 to 128 MiB
MOST_A_MS, MOST_B = 1.0, {"mooncake": 1.3, "nixl": 1.6}


# ---------------------------------------------------------------- a bare read


class BareRead:
    """One engine that reads from one peer, each in a process of its own."""

    def __init__(self, backend: str, size: int) -> None:
        context = mp.get_context("fork")
        ours, theirs = context.Pipe()
        self._pipe, reader = context.Pipe()
        self._processes = [
            context.Process(target=serve, args=(theirs, backend, size), daemon=True),
            context.Process(target=_read, args=(reader, ours, backend, size), daemon=True),
        ]
        for process in self._processes:
            process.start()

    def seconds(self, size: int) -> float:
        self._pipe.send(size)
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError("the bare read does not end")
        return float(self._pipe.recv())

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _read(pipe: Any, server: Any, backend: str, largest: int) -> None:
    _, name, remote = server.recv()
    memory, expected, parent = np.zeros(largest, np.uint8), truth(largest), os.getppid()
    read = BARE[backend](memory, name, remote)
    while True:
        while not pipe.poll(LOOK_S):
            if os.getppid() != parent:
                os._exit(0)
        size = pipe.recv()
        memory[:size] = 0
        start = time.perf_counter()
        read(size, False)
        seconds = time.perf_counter() - start
        assert (memory[:size] == expected[:size]).all()
        pipe.send(seconds)


@contextmanager
def bare_read(backend: str, size: int) -> Iterator[BareRead]:
    made = BareRead(backend, size)
    try:
        yield made
    finally:
        made.end()


# ---------------------------------------------------------------- samples


def over(ring: rings.Ring, tokens: int, layout: str) -> Callable[[Samples], None]:
    """A request, as one sample: the whole of it, and until its draft KV was there."""

    def once(samples: Samples) -> None:
        found = ring.transfer(tokens, layout)
        ring.clear()
        samples.add(found["success"], draft=found["draft"])

    return once


def measure(
    backend: str, sizes: tuple[int, int], tokens: tuple[int, ...], count: int
) -> tuple[list[Record], list[Record]]:
    """All cells of one backend and direction, and the lines through them."""
    cells: list[Record] = []
    lines: list[Record] = []
    name = f"{sizes[0]} to {sizes[1]}"
    with (
        rings.rings(WAYS, *sizes, backend, max(tokens)) as made,
        bare_read(backend, max(tokens) * rings.TOKEN_BYTES) as bare,
    ):
        for layout in rings.LAYOUTS:
            taken: dict[int, dict[str, Samples]] = {}
            for one in tokens:
                print(backend, name, layout, one, file=sys.stderr)
                taken[one] = cell(made, bare, one, layout, count)
                cells += records(taken[one], one, backend=backend, direction=name, layout=layout)
            head = {"backend": backend, "direction": name, "layout": layout}
            lines += [{**head, **one} for one in fits(taken)]
        for ring in made.values():
            for layout in rings.LAYOUTS:
                ring.check(max(tokens), layout)
    return cells, lines


def cell(
    made: dict[str, rings.Ring], bare: BareRead, tokens: int, layout: str, count: int
) -> dict[str, Samples]:
    """Samples by method. Bytes are compared before."""
    size = tokens * rings.TOKEN_BYTES
    methods: dict[str, Callable[[Samples], None]] = {
        way: over(ring, tokens, layout) for way, ring in made.items()
    }
    methods["bare"] = lambda samples: samples.add(bare.seconds(size))
    for ring in made.values():
        ring.check(tokens, layout)
    interleave(methods, 2)
    found = interleave(methods, count)
    split: dict[str, Samples] = {}
    for way in made:
        both = found.pop(way)
        split |= {way: Samples(both.parts["draft"]), f"{way}, whole": Samples(both.total)}
    return {**split, **found}


def records(taken: dict[str, Samples], tokens: int, **head: str) -> list[Record]:
    """One a method; its ratio to the bare read, turn by turn, with its interval."""
    found = []
    for name, samples in taken.items():
        record = {**head, "tokens": tokens, "bytes": tokens * rings.TOKEN_BYTES, "method": name}
        low, high = interval(np.median, np.divide(samples.total, taken["bare"].total))
        record |= Samples(samples.total).record() | {"ratio": ratio(samples, taken["bare"])}
        found.append({**record, "ratio_low": low, "ratio_high": high})
    return found


# ---------------------------------------------------------------- lines


def fits(taken: dict[int, dict[str, Samples]]) -> list[Record]:
    """The line of each method, its b as a ratio to a bare read's, and intervals."""
    by_method = {
        method: {n * rings.TOKEN_BYTES: np.array(t[method].total) for n, t in taken.items()}
        for method in next(iter(taken.values()))
    }
    rng, drawn = np.random.default_rng(1), {name: np.empty((DRAWS, 2)) for name in by_method}
    for draw in range(DRAWS):
        for name, seconds in by_method.items():
            again = {size: rng.choice(values, len(values)) for size, values in seconds.items()}
            drawn[name][draw] = line(again)
    found = []
    bare = line(by_method["bare"])[1]
    for name, seconds in by_method.items():
        a, b = line(seconds)
        lows, highs = np.percentile(drawn[name], [2.5, 97.5], axis=0)
        least, most = np.percentile(drawn[name][:, 1] / drawn["bare"][:, 1], [2.5, 97.5])
        found.append(
            {"method": name, "a_ms": a * 1e3, "a_low": lows[0] * 1e3, "a_high": highs[0] * 1e3,
             "gb_s": 1e-9 / b, "gb_s_low": 1e-9 / highs[1], "gb_s_high": 1e-9 / lows[1],
             "b_to_bare": b / bare, "b_low": float(least), "b_high": float(most)}
        )  # fmt: skip
    return found


def checks(parts: dict[str, list[Record]]) -> list[Check]:
    found = []
    for one in parts["lines"]:
        where = f"{one['backend']} {one['direction']}, {one['layout']}"
        if one["method"] == "channel":
            found.append(Check(f"{where}: a, ms", MOST_A_MS, one["a_ms"]))
            found.append(
                Check(f"{where}: b to a bare read's", MOST_B[one["backend"]], one["b_to_bare"])
            )
    return found


def main() -> None:
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", default=",".join(BACKENDS), help="default mooncake,nixl")
    arguments = parser.parse_args()
    tokens = TOKENS[:3] if arguments.quick else TOKENS
    count = repeats(arguments, 15)
    result = Result("cost", arguments.quick, {"lines": [], "cells": []})
    rings.load_sglang()
    for backend in arguments.backends.split(","):
        for sizes in DIRECTIONS:
            cells, lines = measure(backend, sizes, tokens, count)
            result.parts["cells"] += cells
            result.parts["lines"] += lines
    result.checks = checks(result.parts)
    result.finish(arguments)


if __name__ == "__main__":
    main()
