"""Slots in GPU memory between two processes, over the product's data plane of Mooncake or NIXL.

    prefill   packer.py: a process of its own on --peer-gpu, this one by default, or on --peer
    decode    the part's own process

A turn is a request through the channel, from OPEN to the last row in its place: packed, read and
unpacked, in slots one behind the other. A bare read is one of as many bytes, at once, by the same
engine. Every byte is compared; half of the heads are wanted, and the rows are zeros before.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import time
from collections.abc import Iterator

import channel
import msgspec
import needs
import numpy as np
import packer
import scene
import torch
from parts import Found, Record, Wrong

from sglang_mixkv.channel.data_plane import Outcome
from sglang_mixkv.draft.rows import DraftRows

HEADS = range(4, 8)
CONNECT_S = 30


@contextlib.contextmanager
def prefill_side(options: argparse.Namespace) -> Iterator[packer.Lines]:
    """A connection to the process that packs."""
    if options.peer:
        host, _, port = options.peer.rpartition(":")
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            connection.settimeout(None)
            yield packer.Lines(connection)
        return
    mine, theirs = socket.socketpair()
    with packer.child(options, options.peer_gpu, theirs) as process, mine:
        try:
            yield packer.Lines(mine)
        finally:
            process.kill()


class Turns:
    """One dtype: requests, and bare reads. Decode's pages are in order, so its rows are tokens."""

    def __init__(
        self, options: argparse.Namespace, backend: str, dtype: str, there: packer.Lines
    ) -> None:
        drafter, device = scene.DRAFTERS[packer.DRAFTER], scene.device_of(options)
        self._page, seed = scene.LAYOUTS[packer.LAYOUT], options.seed
        per_token = 2 * drafter.layers * len(HEADS) * scene.HEAD * scene.DTYPES[dtype].itemsize
        self.tokens = (options.transfer_mb << 20) // per_token // self._page * self._page
        self.size = self.tokens * per_token
        truth = scene.as_bytes(packer.pool(dtype, self.tokens, device, seed))
        places = torch.from_numpy(scene.rows_of(self.tokens, self._page, seed)).to(device)
        self._wanted = [entry[places][:, HEADS.start :].contiguous() for entry in truth]
        self._pool = [torch.zeros_like(entry) for entry in self._wanted]
        rows, plane = DraftRows(self._pool, HEADS), packer.plane_of(backend, there.host)
        self._staging, self._plane = channel.staged(rows, plane)
        self._decode = channel.Decode(rows, self._staging, self._plane)
        there.put([backend, dtype, self.tokens, seed])
        row = there.get()
        if row is None:
            raise Wrong("the prefill process ended when it started")
        self._row = msgspec.convert(row, channel.Row)
        self._source = self._decode.source(self._row)
        self._there, self._rooms = there, itertools.count(1)
        self.packed = 0.0

    def wrong(self) -> int:
        return scene.wrong_bytes(self._pool, self._wanted)

    def request(self) -> float:
        """Seconds of one through the channel."""
        for entry in self._pool:
            entry.zero_()
        if self._pool[0].device.type == "cuda":
            torch.cuda.synchronize()
        room, pages = next(self._rooms), np.arange(self.tokens // self._page)
        self._there.put(room)
        start = time.perf_counter()
        state = self._decode.fetch(room, self.tokens, [self._source], pages, self._page)
        seconds = time.perf_counter() - start
        packed = self._there.get()
        if state != "warm" or packed is None:
            raise Wrong(f"a request became {state}")
        self.packed = packed
        return seconds

    def bare(self) -> float:
        """Seconds of one read of as many bytes, in proportion where the slots have fewer."""
        peer = self._plane.connect(self._row.staging.endpoint)
        start = time.perf_counter()
        here, remote = self._staging.address, self._row.staging.address(0)
        length = min(self.size, self._staging.size)
        read = self._plane.start(peer, here, remote, length)
        while (outcome := self._plane.outcome(read)) is None:
            time.sleep(0)
        if outcome is not Outcome.DONE:
            raise Wrong(f"a bare read failed: {read.why}")
        return (time.perf_counter() - start) * self.size / length

    @property
    def unpacked(self) -> float:
        return self._decode.notes.seconds

    def close(self) -> None:
        self._decode.inbox.shut()


def measure(turns: Turns, dtype: str, count: int) -> Record:
    """The first turn, in which memory and connections are new, is compared and not timed."""
    before, wrong, received = turns.wrong(), 0, needs.rdma_bytes()
    taken: dict[str, list[float]] = {"pack + read + unpack": [], "bare read": []}
    for _ in range(count + 1):
        taken["pack + read + unpack"].append(turns.request())
        wrong = max(wrong, turns.wrong())
        taken["bare read"].append(turns.bare())
    whole, bare = (float(np.median(seconds[1:])) for seconds in taken.values())
    return {
        "dtype": dtype, "tokens": turns.tokens, "bytes": turns.size,
        "wrong before": before, "wrong": wrong,
        "pack + read + unpack ms": whole * 1e3, "bare read ms": bare * 1e3, "times": whole / bare,
        "pack ms": turns.packed / (count + 1) * 1e3,
        "unpack ms": turns.unpacked / (count + 1) * 1e3,
        "bare GB/s": turns.size / bare / 1e9,
        "RDMA MiB": (needs.rdma_bytes() - received) / (2 * count + 2) / 2**20,
    }  # fmt: skip


def run(options: argparse.Namespace, backend: str) -> Found:
    figures: list[Record] = []
    for dtype in scene.DTYPES:
        with prefill_side(options) as there:
            turns = Turns(options, backend, dtype, there)
            figures.append(measure(turns, dtype, options.repeats))
            turns.close()
    ratio = max(figure["times"] for figure in figures)
    where = "another host" if options.peer else f"GPU {options.peer_gpu}"
    message = f"every byte right from {where}"
    message += f"; pack, read and unpack take {ratio:.2f} times a bare read"
    if options.device == "cpu":
        message = "every byte right, in host memory"
    found = Found(message, figures)
    for figure in figures:
        if figure["wrong"] or not figure["wrong before"]:
            text = f"{figure['wrong']:,} wrong bytes of {figure['bytes']:,}"
            raise Wrong(f"{figure['dtype']}: {text}, {figure['wrong before']:,} before", found)
    return found
