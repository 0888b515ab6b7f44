"""What the channel waits for, shown by what moves if it does not.

    early send            prefill's forward writes a chunk's rows, late; the chunk has the event
                          behind it, and is packed when that is done (sender.py, outbox.py)
    indices               the chunk's page numbers are on their way from the GPU, with an event
    forward before unpack a finished request's forward writes decode's rows, late; the room has the
                          event behind it, and is unpacked when that is done (receiver.py, inbox.py)
    host wait of pack     pack's copies are late; pack waits for them, and then another's read of
    host wait of unpack   the slot, or of decode's rows, begins (rows.py, own_stream)

Each runs with its wait and without. With it every byte has to be the right one. Without it some
must not be: otherwise the first run would have shown nothing.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import channel
import numpy as np
import scene
import streams
import torch
from parts import Found, Record, Wrong
from sglang_mixkv.prefill.outbox import Pages

from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.slot_format import HEADER

DRAFTER = scene.DRAFTERS[0]
PAGE, COUNT = 16, 32
TOKENS = PAGE * COUNT
STAMP = 7
UNWAITED = "wrong without the wait"


class Order:
    """A prefill and a decode rank on one device. Each claim: bytes that are not the right ones."""

    def __init__(self, made: Any, device: torch.device) -> None:
        self._streams, self._rooms = made, itertools.count(1)
        self._truth = self._pool(device, 1)
        self._pool_p, self._pool_d = self._pool(device, 2), self._pool(device, 3)
        held = range(DRAFTER.heads)
        self._rows_p, self._rows_d = (
            DraftRows(pool, held, by_numpy=False) for pool in (self._pool_p, self._pool_d)
        )
        stagings: list[Staging] = []
        sides = [
            channel.staged(rows, channel.Local(stagings)) for rows in (self._rows_p, self._rows_d)
        ]
        stagings += [staging for staging, _ in sides]
        self._prefill = channel.Prefill(self._rows_p, *sides[0])
        self._decode = channel.Decode(self._rows_d, *sides[1])
        self._source = self._decode.source(self._prefill.row)
        self._pages = scene.pages_of(TOKENS, PAGE, 4)
        self.size = TOKENS * self._rows_p.bytes_per_token(DRAFTER.heads)
        self._slot = Staging(1, self.size + 2 * HEADER, device).slot(0)
        self._device = device
        self.claims: dict[str, Callable[[bool], int]] = {
            "early send": self._early,
            "indices": self._indices,
            "forward before unpack": self._forward,
            "host wait of pack": self._pack,
            "host wait of unpack": self._unpack,
        }

    @staticmethod
    def _pool(device: torch.device, seed: int) -> list[torch.Tensor]:
        return scene.pool(DRAFTER.layers, DRAFTER.heads, TOKENS, "bf16", device, seed)

    @staticmethod
    def _write(pool: list[torch.Tensor], data: list[torch.Tensor]) -> None:
        for entry, new in zip(pool, data, strict=True):
            entry.copy_(new)

    def wrong(self, name: str, waits: bool) -> int:
        """Of one claim, from the same start."""
        self._write(self._pool_p, self._truth)
        self._write(self._pool_d, self._pool(self._device, 3))
        self._slot.zero_()
        self._settle()
        found = self.claims[name](waits)
        self._settle()
        return found

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _transfer(self, pages: Any, events: list[Any], event: Any = None) -> None:
        """A request through the channel. Decode's pages are in order, so its rows are tokens."""
        room = next(self._rooms)
        use = self._prefill.send(room, TOKENS, Pages(pages, PAGE, events))
        mine = np.arange(COUNT)
        state = self._decode.fetch(room, TOKENS, [self._source], mine, PAGE, event)
        self._prefill.end(use)
        if state != "warm":
            raise Wrong(f"a request that became {state}")

    def _misplaced(self) -> int:
        """Bytes of decode's pool that are not the request's."""
        rows = torch.from_numpy(scene.rows_of(TOKENS, PAGE, 4)).to(self._device)
        return scene.wrong_bytes(self._pool_d, [entry[rows] for entry in self._truth])

    def _early(self, waits: bool) -> int:
        self._write(self._pool_p, self._pool(self._device, 2))
        self._settle()
        forward = self._streams.stream()
        forward.late(partial(self._write, self._pool_p, self._truth))
        event = forward.mark()
        self._transfer(self._pages, [event] if waits else [])
        forward.synchronize()
        return self._misplaced()

    def _indices(self, waits: bool) -> int:
        computed = torch.from_numpy(self._pages).to(self._device)
        pages = torch.zeros(COUNT, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        copier = self._streams.stream()
        self._settle()
        copier.late(lambda: pages.copy_(computed, non_blocking=True))
        event = copier.mark()
        self._transfer(pages, [event] if waits else [])
        copier.synchronize()
        return self._misplaced()

    def _forward(self, waits: bool) -> int:
        others = self._pool(self._device, 5)
        self._settle()
        forward = self._streams.stream()
        forward.late(partial(self._write, self._pool_d, others))
        event = forward.mark()
        self._transfer(self._pages, [], event if waits else None)
        forward.synchronize()
        return self._misplaced()

    def _pack(self, waits: bool) -> int:
        """What a read finds in the slot."""
        seen, reader = torch.zeros_like(self._slot), self._streams.stream()
        self._settle()
        with self._streams.slowly(waits):
            self._rows_p.pack(np.arange(TOKENS), self._rows_p.heads, self._slot, STAMP)
            reader.now(lambda: seen.copy_(self._slot))
            reader.synchronize()
        wanted = torch.cat([entry.flatten() for entry in scene.as_bytes(self._truth)])
        return int((seen[HEADER : HEADER + self.size] != wanted).sum())

    def _unpack(self, waits: bool) -> int:
        """What decode's next forward finds in its pool."""
        every = np.arange(TOKENS)
        self._rows_p.pack(every, self._rows_p.heads, self._slot, STAMP)
        seen, forward = [torch.zeros_like(e) for e in self._pool_d], self._streams.stream()
        self._settle()
        with self._streams.slowly(waits):
            self._rows_d.unpack(every, self._rows_d.heads, self._slot)
            forward.now(partial(self._write, seen, self._pool_d))
            forward.synchronize()
        return scene.wrong_bytes(seen, self._truth)

    def close(self) -> None:
        self._decode.inbox.shut()
        self._prefill.outbox.close()


def run(options: argparse.Namespace) -> Found:
    device = scene.device_of(options)
    order = Order(streams.here(options.device, options.delay_ms), device)
    figures: list[Record] = []
    for name in order.claims:
        wrong = {waits: order.wrong(name, waits) for waits in (True, False)}
        figures.append(
            {"claim": name, "bytes": order.size, "wrong": wrong[True], UNWAITED: wrong[False]}
        )
    order.close()
    found = Found(f"{len(figures)} waits; without each of them bytes are wrong", figures)
    for figure in figures:
        if figure["wrong"]:
            text = f"{figure['wrong']:,} wrong bytes of {order.size:,}"
            raise Wrong(f"{figure['claim']}: {text}", found)
        if not figure[UNWAITED]:
            text = f"{figure['claim']}: no wrong byte without the wait either: nothing was shown"
            raise Wrong(f"{text} (a longer --delay-ms may help)", found)
    return found
