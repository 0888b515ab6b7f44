"""KV from GPU memory to GPU memory over Mooncake or NIXL, by the product's transports, on loopback.

    sender     the part's own process
    receiver   a process of its own: registers memory, says where, and what arrived

Without a GPU the same in host memory. Over NIXL the sender then names another GPU of the peer than
that on which its memory is: the write has to fail, with no byte written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import devices
import needs
import numpy as np
import wires
from common import MOONCAKE_ENV
from parts import Found, Record, Wrong

from sglang_mixkv.kv.plan import Ints
from sglang_mixkv.kv.ranges import Blocks
from sglang_mixkv.rows.host import Buffer
from sglang_mixkv.transport.nixl import Memory

RANGE = 16 << 10
SAYS = "mixkv-peer "


def engine(backend: str, device: str, gpu: int, peer_gpu: int) -> Any:
    """An engine for memory of this device."""
    if backend == "mooncake":
        return wires.MooncakeEngine()
    if device == "cuda":
        return wires.NixlEngine(Memory("VRAM", gpu), peer_gpu)
    return wires.NixlEngine()


def pattern(seed: int, size: int) -> devices.Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def order(seed: int, size: int) -> Ints:
    """To which range of the destination each of the source goes."""
    return np.random.default_rng(seed + 1).permutation(size // RANGE)


# ---------------------------------------------------------------- the receiver


def receive(backend: str, device: str, gpu: int, size: int) -> None:
    """Say where to write, then for each seed that comes how many bytes are not that pattern."""
    here = devices.here(argparse.Namespace(device=device, gpu=gpu))
    memory, listening = here.rows.allocate(size), engine(backend, device, gpu, gpu)
    if code := listening.batch_register([memory.address], [size]):
        raise SystemExit(f"registering returned {code}")
    told = {"session": listening.session, "hello": listening.hello.hex(),
            "address": memory.address}  # fmt: skip
    print(SAYS + json.dumps(told), flush=True)
    for line in sys.stdin:
        seed = int(line)
        wanted = np.zeros(size, np.uint8)
        if seed >= 0:
            there = order(seed, size)
            wanted.reshape(-1, RANGE)[there] = pattern(seed, size).reshape(-1, RANGE)
        wrong = int((here.get(memory) != wanted).sum())
        here.put(memory, np.zeros(size, np.uint8))  # before the next write can come
        print(SAYS + json.dumps(wrong), flush=True)


class Peer:
    """The receiver's process."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.told: Record = self._hear()

    def _hear(self) -> Any:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(SAYS):
                return json.loads(line.removeprefix(SAYS))
        raise Wrong(f"the receiver ended with status {self._child.wait()}")

    def wrong_bytes(self, seed: int) -> int:
        """How many are not this seed's pattern; a negative seed: not zero. All are zero then."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{seed}\n")
        self._child.stdin.flush()
        return int(self._hear())


@contextlib.contextmanager
def peer(backend: str, options: argparse.Namespace, size: int) -> Iterator[Peer]:
    args = [backend, options.device, str(options.peer_gpu), str(size)]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, __file__, *args], env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        try:
            yield Peer(child)
        finally:
            child.kill()


# ---------------------------------------------------------------- the sender


def seconds(transport: Any, session: str, blocks: Blocks) -> tuple[int, float]:
    """The code of one write, and how long it took."""
    start = time.perf_counter()
    code = transport.wait(transport.write(session, blocks))
    return int(code), time.perf_counter() - start


def ranges(source: Buffer, target: int, seed: int) -> Blocks:
    """All of a source in pieces, each to a place of its own at a target of the same size."""
    there = order(seed, source.size)
    src = source.address + RANGE * np.arange(len(there))
    return Blocks(src, target + RANGE * there, there * 0 + RANGE)


def run(options: argparse.Namespace, backend: str) -> Found:
    os.environ.update(MOONCAKE_ENV)
    needs.check_backend(backend, options.device)
    device, size = devices.here(options), options.transfer_mb << 20
    sending = engine(backend, options.device, options.gpu, options.peer_gpu)
    transport, _ = wires.sending(sending)
    source, seed, figures = device.rows.allocate(size), options.seed, list[Record]()
    device.put(source, pattern(seed, size))
    if code := sending.batch_register([source.address], [size]):
        raise Wrong(f"registering {size >> 20} MiB returned {code}")
    with peer(backend, options, size) as there:
        session, target = there.told["session"], there.told["address"]
        sending.meet(bytes.fromhex(there.told["hello"]))
        blocks = ranges(source, target, seed)
        for turn in ("first", "second"):
            code, took = seconds(transport, session, blocks)
            figures.append(
                {"write": turn, "ranges": len(blocks.length), "bytes": size, "code": code,
                 "wrong bytes": there.wrong_bytes(seed), "ms": took * 1e3,
                 "GB/s": size / took / 1e9}
            )  # fmt: skip
        if backend == "nixl":
            sending.peer_device += 1
            code, _ = seconds(transport, session, blocks)
            wrong = there.wrong_bytes(-1)
            figures.append({"write": "another GPU's number", "code": code, "wrong bytes": wrong})
    return judged(options, backend, figures)


def judged(options: argparse.Namespace, backend: str, figures: list[Record]) -> Found:
    number = f"GPU {options.gpu} -> GPU {options.peer_gpu}"
    where = number if options.device == "cuda" else "host memory"
    second = figures[1]
    says = (
        f"{where}: {second['bytes'] >> 20} MiB in {second['ranges']:,} ranges, every byte right, "
        f"{second['GB/s']:.2f} GB/s"
    )
    says += "; a write to another GPU's number is refused" if backend == "nixl" else ""
    found = Found(says, figures, figures)
    for figure in figures:
        should_fail = figure["write"] not in ("first", "second")
        if bool(figure["code"]) != should_fail or figure["wrong bytes"]:
            text = f"{where}, {figure['write']} write: code {figure['code']}, "
            raise Wrong(text + f"{figure['wrong bytes']:,} wrong bytes", found)
    return found


if __name__ == "__main__":
    receive(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
