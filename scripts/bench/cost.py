"""What a transfer of draft KV costs, as a + b x bytes, beside a bare read of as many bytes.

    channel    from prefill's `send` until the draft KV is in place on all decode ranks
    bare       one `transfer_sync_read` of as many bytes by one Mooncake engine from one peer

The ways take turns, over Mooncake's TCP. A request is one chunk, and all ranks know it when `send`
is called. The drafter has 4 KiB a token over all its ranks: one layer of K and V, 8 heads of 256
bytes. Intervals are those of lines through samples drawn anew within each size.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import rings
from common import DRAWS, Parts, Record, interleave, line, options, show

WAYS = ("channel",)
DIRECTIONS = ((2, 1), (1, 2))
TOKENS = tuple(64 << step for step in range(10))  # 0.25 to 128 MiB


class BareRead:
    """One engine that reads from another, each in a process of its own."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        (there, server), (self._pipe, reader) = context.Pipe(), context.Pipe()
        self._processes = [
            context.Process(target=_serve, args=(server, size), daemon=True),
            context.Process(target=_read, args=(reader, there, size), daemon=True),
        ]
        for process in self._processes:
            process.start()

    def seconds(self, size: int) -> float:
        self._pipe.send(size)
        if not self._pipe.poll(rings.LIMIT_S):
            raise TimeoutError("the bare read does not end")
        return float(self._pipe.recv())

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _truth(size: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.random.default_rng(1).bytes(size), np.uint8)


def _engine(memory: np.ndarray[Any, Any]) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return engine


def _commands(pipe: Any) -> Iterator[int]:
    """What comes, as long as the parent lives."""
    parent = os.getppid()
    while os.getppid() == parent:
        if pipe.poll(rings.LOOK_S):
            yield pipe.recv()


def _serve(pipe: Any, size: int) -> None:
    memory = _truth(size).copy()
    engine = _engine(memory)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", memory.ctypes.data))
    for _ in _commands(pipe):
        pass


def _read(pipe: Any, server: Any, largest: int) -> None:
    memory, truth = np.zeros(largest, np.uint8), _truth(largest)
    engine, (name, remote) = _engine(memory), server.recv()
    for size in _commands(pipe):
        memory[:size] = 0
        start = time.perf_counter()
        assert engine.transfer_sync_read(name, memory.ctypes.data, remote, size) == 0
        seconds = time.perf_counter() - start
        assert (memory[:size] == truth[:size]).all()
        pipe.send(seconds)


def measure(sizes: tuple[int, int], tokens: tuple[int, ...], count: int) -> Parts:
    """The lines of one direction, and the medians that they go through. Bytes are compared first,
    in each layout and size."""
    found: Parts = {"lines": [], "medians": []}
    bare = BareRead(max(tokens) * rings.TOKEN_BYTES)
    with rings.rings(WAYS, *sizes, max(tokens)) as made:
        for layout in rings.LAYOUTS:
            head = {"direction": f"{sizes[0]} to {sizes[1]}", "layout": layout}
            taken: dict[int, dict[str, list[float]]] = {}
            for one in tokens:
                print(*head.values(), one, file=sys.stderr)
                size = one * rings.TOKEN_BYTES
                for ring in made.values():
                    ring.check(one, layout)
                methods: dict[str, Callable[[], float]] = {
                    way: partial(transfer, ring, one, layout) for way, ring in made.items()
                }
                methods["bare"] = partial(bare.seconds, size)
                interleave(methods, 2)
                taken[size] = interleave(methods, count)
                medians = {f"{n} ms": np.median(t) * 1e3 for n, t in taken[size].items()}
                found["medians"].append({**head, "MiB": size / 2**20, **medians})
            found["lines"] += [{**head, **record} for record in fits(taken)]
    bare.end()
    return found


def transfer(ring: rings.Ring, tokens: int, layout: str) -> float:
    seconds = ring.transfer(tokens, layout)
    ring.clear()
    return seconds


def fits(taken: dict[int, dict[str, list[float]]]) -> list[Record]:
    """Each method's line, with b as a multiple of a bare read's."""
    by_method = {
        method: {size: np.array(samples[method]) for size, samples in taken.items()}
        for method in next(iter(taken.values()))
    }
    rng, drawn = np.random.default_rng(1), {name: np.empty((DRAWS, 2)) for name in by_method}
    for draw in range(DRAWS):
        for name, seconds in by_method.items():
            again = {size: rng.choice(values, len(values)) for size, values in seconds.items()}
            drawn[name][draw] = line(again)
    found, bare = list[Record](), line(by_method["bare"])[1]
    for name, seconds in by_method.items():
        a, b = line(seconds)
        lows, highs = np.percentile(drawn[name], [2.5, 97.5], axis=0)
        least, most = np.percentile(drawn[name][:, 1] / drawn["bare"][:, 1], [2.5, 97.5])
        found.append(
            {"method": name, "a ms": a * 1e3, "a low": lows[0] * 1e3, "a high": highs[0] * 1e3,
             "GB/s": 1e-9 / b, "b to bare": b / bare, "b low": least, "b high": most}
        )  # fmt: skip
    return found


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    tokens = TOKENS[:3] if arguments.quick else TOKENS
    count = arguments.repeats or (3 if arguments.quick else 15)
    parts: Parts = {"lines": [], "medians": []}
    rings.load_sglang()
    for sizes in DIRECTIONS:
        for name, records in measure(sizes, tokens, count).items():
            parts[name] += records
    show(arguments, parts)


if __name__ == "__main__":
    main()
