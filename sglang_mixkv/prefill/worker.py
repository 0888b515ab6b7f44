"""One of SGLang's transfer threads: what it works on, and what it works with."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sglang_mixkv.prefill.packing import PackBuffer
from sglang_mixkv.prefill.rooms import Room, Rooms
from sglang_mixkv.prefill.writer import ChunkWriter
from sglang_mixkv.rows.digest import Digester
from sglang_mixkv.rows.host import Rows
from sglang_mixkv.transport.base import Transport

logger = logging.getLogger(__name__)

# How long a pack buffer that could not be had is not asked for again.
RETRY_BUFFER_S = 60.0


@dataclass(frozen=True)
class Task:
    """What a transfer thread took from SGLang's queue: a chunk of a room, from its page `start`
    on. `written`: the end of a forward that may still write it (a CUDA event), where SGLang's own
    thread does not wait for it."""

    room: Room
    start: int
    written: Any = None


class Worker:
    """One of SGLang's transfer threads: what it works on, and the buffers it works with.

    `code`: the first of this send that is not 0, and `writes`: of this send, on SGLang's executor:
    where SGLang's own code raises, what it handed to the transport before has to end first.
    `posted`: what SGLang's own code began for this task and waits for later, by session.
    """

    def __init__(self, rooms: Rooms, writer: ChunkWriter, digester: Digester) -> None:
        self._rooms, self.writer, self.digester = rooms, writer, digester
        self.task: Task | None = None
        self.code = 0
        self.writes: list[Future[int]] = []
        self.posted: list[tuple[str, Any]] = []

    def take(self, task: Task) -> bool:
        """Another task. False, and none, if its request has ended."""
        assert self.task is None, self.task
        self.task = task if self._rooms.begin_chunk(task.room) else None
        return self.task is not None

    def rest(self) -> None:
        """SGLang has done with the task."""
        task, self.task = self.task, None
        self.posted.clear()
        if task is not None:
            self._rooms.end_chunk(task.room)

    def begin(self) -> None:
        """Another send begins."""
        self.code = 0
        self.writes.clear()

    def settle(self) -> int:
        """Wait for what SGLang's executor still writes. 0, or the first code that is not."""
        for write in self.writes:
            failed = write.cancel() or write.exception() is not None
            self.code = self.code or (0 if failed else int(write.result()))
        return self.code


class PackMemory:
    """One thread's pack buffer, made at the first need; what could not be had is not asked for
    again at once, since asking can be slow on a GPU that is short of memory."""

    def __init__(self, transport: Transport, rows: Rows, size: int) -> None:
        self._transport, self._rows, self._size = transport, rows, size
        self._next_try = 0.0

    def get(self) -> PackBuffer | None:
        now = time.monotonic()
        if now < self._next_try:
            return None
        self._next_try = now + RETRY_BUFFER_S
        try:
            memory = self._rows.allocate(self._size)
            self._transport.register(memory.address, memory.size)
        except MemoryError as error:
            logger.warning(
                "[MIXKV-MEM-01] sglang-mixkv: no pack buffer of %d bytes (%s); slices go "
                "without it",
                self._size, error,
            )  # fmt: skip
            return None
        return PackBuffer(memory.address, memory.size, memory.owner)
