"""A rank with many peers: its threads, sockets and state machine are the real ones, its peers are
stood in for, and what it reads is in its own memory.

Peers have numbers from 0 on, as many to a process as `each`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from sglang_mixkv.channel.data_plane import Endpoint, Memory
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.draft.facts import StagingFacts
from sglang_mixkv.draft.rows import Staging

from .stand_ins import STAMP, PrefillRanks, Readers
from .threads import HEADS, SEGMENT, SLOT_BYTES, Decode, Prefill, wait_for

PAUSE_S, LIMIT_S = 3e-4, 90.0


class DecodeRank(Decode):
    """With prefill ranks, `count` in all."""

    thread = "mixkv-decode"

    def __init__(self, count: int, each: int, times: Times | None = None) -> None:
        each = min(count, each)
        self.processes = [PrefillRanks(each) for _ in range(count // each)]
        super().__init__(times or Times())
        self.each, self.count, self._numbers = each, 0, itertools.count(1)
        self.names: dict[int, bytes] = {}
        self.image = Staging(1, SLOT_BYTES, torch.device("cpu"))
        self.rows.pack(np.arange(SEGMENT), HEADS, self.image.slot(0), STAMP)
        self._ready: dict[int, float] = {}  # when the first answer came, by generation
        self._watch()

    def _watch(self) -> None:
        machine: Any = self.channel._machine
        handle = machine.handle

        def watched(event: ev.Event, now: float) -> None:
            if isinstance(event, ev.Received):
                self._ready.setdefault(event.message.generation, time.perf_counter())
            handle(event, now)

        machine.handle = watched

    def connect(self, count: int) -> None:
        """To so many more; or again to those that are forgotten, with 0."""
        self.count += count
        for number in range(self.count):
            instance, address = self.processes[number // self.each].rows[number % self.each]
            if self.names.get(number) != instance:
                self.names[number] = instance
                self.reach(self._row(instance, address))
        assert wait_for(lambda: all(map(self.channel.knows, self.names.values())))

    def _row(self, instance: bytes, address: str) -> Any:
        memory = Memory(self.image.address, self.image.size)
        there = msgspec.msgpack.encode(Endpoint(self.plane.name, b"", memory, os.urandom(8)))
        facts = StagingFacts(self.plane.name, there, self.image.address, SLOT_BYTES, 1)
        return SimpleNamespace(instance=instance, address=address, staging=facts)

    def gone(self, peers: Iterable[int]) -> list[int]:
        """Those that are not known to be other instances yet, of peers that are."""
        return [peer for peer in peers if self.names[peer] not in self.forgotten]

    def run(self, peers: list[int], window: int) -> list[float | None]:
        """A room each, so many at a time: seconds to the first READY; None of one that is cold."""
        found, waiting = list[float | None](), deque(peers)
        begun: deque[tuple[float, ReceiveHandle]] = deque()
        while waiting or begun:
            while waiting and len(begun) < window:
                begun.append((time.perf_counter(), self._begin(waiting.popleft())))
            if begun[0][1].state is None:
                time.sleep(PAUSE_S)
                continue
            since, handle = begun.popleft()
            self.channel.close(handle)
            ready = self._ready.pop(handle.opened.generation, since)
            found.append(ready - since if handle.state is ev.State.WARM else None)
        return found

    def _begin(self, peer: int) -> ReceiveHandle:
        handle = self.open(next(self._numbers), SEGMENT, self.names[peer])
        self.channel.target_arrived(handle)
        return handle

    def close(self) -> None:
        super().close()
        for process in self.processes:
            process.close()


class PrefillRank(Prefill):
    """With readers, `count` in all."""

    thread = "mixkv-prefill"

    def __init__(self, count: int, each: int, times: Times | None = None) -> None:
        self.each = min(count, each)
        self.processes = [Readers() for _ in range(count // self.each)]
        super().__init__(times or Times())
        self.count, self._numbers = 0, itertools.count(1)

    def connect(self, count: int) -> None:
        """So many more."""
        for number, process in enumerate(self.processes):
            first, end = number * self.each, (number + 1) * self.each
            some = min(self.count + count, end) - max(self.count, first)
            if some > 0:
                process.connect(some, self.channel.address, self.instance)
        self.count += count

    def run(self, peers: list[int], window: int) -> list[float | None]:
        """A room each, so many at a time: seconds from OPEN to the first READY."""
        found: list[float | None] = []
        for first in range(0, len(peers), window):
            places = [divmod(peer, self.each) for peer in peers[first : first + window]]
            handles, rooms = [], dict[int, list[tuple[int, int]]]()
            for process, reader in places:
                room = next(self._numbers)
                handles.append(self.send(room, SEGMENT))
                rooms.setdefault(process, []).append((reader, room))
            for process, some in rooms.items():
                self.processes[process].open(some)
            taken = {process: iter(self.processes[process].take(LIMIT_S)) for process in rooms}
            found += [next(taken[process]) for process, _ in places]
            for handle in handles:
                assert wait_for(lambda handle=handle: handle.settled)
                self.channel.end(handle)
        return found

    def close(self) -> None:
        super().close()
        for process in self.processes:
            process.close()
