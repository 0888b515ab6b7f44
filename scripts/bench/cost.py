"""Measure a transfer of draft KV, as a + b x bytes, and a bare read of the same number of bytes.

    channel    from prefill's `send` until the draft KV is in place on all decode ranks
    bare       one `transfer_sync_read` of these bytes by one Mooncake engine from one peer

The two take turns, over Mooncake's TCP. A request is one chunk, and all ranks know it when `send`
is called. The drafter has 4 KiB per token over all its ranks: one layer of K and V, 8 heads of 256
bytes. For each layout and size, all bytes are compared first.
"""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import rings
from common import Record, interleave, options, show

DIRECTIONS = ((2, 1), (1, 2))
TOKENS = tuple(64 << step for step in range(10))  # 0.25 to 128 MiB


class BareRead:
    """One engine that reads from another, each in its own process."""

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
            raise TimeoutError("the bare read did not end")
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


def _serve(pipe: Any, size: int) -> None:
    rings.forks.die_with_parent()
    memory = _truth(size).copy()
    engine = _engine(memory)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", memory.ctypes.data))
    pipe.recv()  # blocks until the parent ends this process


def _read(pipe: Any, server: Any, largest: int) -> None:
    rings.forks.die_with_parent()
    memory, truth = np.zeros(largest, np.uint8), _truth(largest)
    engine, (name, remote) = _engine(memory), server.recv()
    while True:
        size = pipe.recv()
        memory[:size] = 0
        start = time.perf_counter()
        assert engine.transfer_sync_read(name, memory.ctypes.data, remote, size) == 0
        seconds = time.perf_counter() - start
        assert (memory[:size] == truth[:size]).all()
        pipe.send(seconds)


def measure(sizes: tuple[int, int], tokens: tuple[int, ...], count: int) -> list[Record]:
    """Measure one direction; return its records, one per layout."""
    found, bare = list[Record](), BareRead(max(tokens) * rings.TOKEN_BYTES)
    with rings.rings(("channel",), *sizes, max(tokens)) as made:
        ring = made["channel"]
        for layout in rings.LAYOUTS:
            taken: dict[str, dict[int, list[float]]] = {"channel": {}, "bare": {}}
            for one in tokens:
                print(*sizes, layout, one, file=sys.stderr)
                size = one * rings.TOKEN_BYTES
                ring.check(one, layout)
                methods: dict[str, Callable[[], float]] = {
                    "channel": partial(ring.transfer, one, layout),
                    "bare": partial(bare.seconds, size),
                }
                interleave(methods, 2)
                for name, seconds in interleave(methods, count).items():
                    taken[name][size] = seconds
            (a, b), (_, bare_b) = (line(seconds) for seconds in taken.values())
            found.append(
                {"direction": f"{sizes[0]} to {sizes[1]}", "layout": layout, "a ms": a * 1e3,
                 "GB/s": 1e-9 / b, "b to bare": b / bare_b}
            )  # fmt: skip
    bare.end()
    return found


def line(seconds: dict[int, list[float]]) -> tuple[float, float]:
    """Fit seconds = a + b x bytes by least squares. Each sample is weighted by the inverse of its
    size's median, since noise grows with time."""
    x = np.concatenate([np.full(len(taken), size) for size, taken in seconds.items()])
    weight = np.concatenate([np.full(len(t), 1 / np.median(t)) for t in seconds.values()])
    b, a = np.polyfit(x, np.concatenate(list(seconds.values())), 1, w=weight)
    return float(a), float(b)


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    tokens = TOKENS[:3] if arguments.quick else TOKENS
    count = arguments.repeats or (3 if arguments.quick else 15)
    rings.load_sglang()
    lines = [record for sizes in DIRECTIONS for record in measure(sizes, tokens, count)]
    show(arguments, {"lines": lines})


if __name__ == "__main__":
    main()
