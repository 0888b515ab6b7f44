"""Copies between a pool and slots: `start` begins them, `ended` reports those that have ended.

Both classes have the same methods. `done`: true where a job has ended. `polled`: whether something
is in flight whose end wakes nobody. `ended`: the jobs that have ended since it was asked last, in
any order: what was found, a SlotCheck, None where the request's gate was closed, or an exception;
and the job's seconds, or its share of its batch's.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang_mixkv.channel.gate import Gate, start_behind

logger = logging.getLogger(f"sglang.{__name__}")

AT_ONCE = 256 << 10
"""Bytes of a host copy that `start` makes itself: some 30 us, less than a hand-over to a thread."""

OK = 0  # SlotCheck.OK (draft/layout.py)
Ended = tuple[Any, Any, float]


class HostCopies:
    """One thread copies, since a copy in host memory takes a core for as long as it lasts.

    `copy`: makes one copy, through its request's gate; it raises nothing. `size_of`: bytes of a
    job. `wake`: called from the thread once a job has ended. `use_device`: called once, in the
    thread.
    """

    polled = False

    def __init__(
        self, name: str, copy: Callable[[Any], Ended], size_of: Callable[[Any], int],
        wake: Callable[[], None], use_device: Callable[[], None],
    ) -> None:  # fmt: skip
        self._copy, self._size_of = copy, size_of
        self._wake, self._use_device = wake, use_device
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done: deque[Ended] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, jobs: Sequence[Any]) -> None:
        for job in jobs:
            if self._size_of(job) <= AT_ONCE:
                self.done.append(self._copy(job))
            else:
                self._work.put(job)

    def ended(self) -> list[Ended]:
        found = []
        while self.done:
            found.append(self.done.popleft())
        return found

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        self._use_device()
        while (job := self._work.get()) is not None:
            self.done.append(self._copy(job))
            self._wake()


class DeviceJob(NamedTuple):
    """`gate`: of its request. `start`: the function of GpuRows that starts a batch of such jobs;
    `what`: the job as that function takes it."""

    gate: Gate
    start: Callable[[list[Any]], Any]
    what: Any


class DeviceCopies:
    """Copies on a GPU (draft/rows_gpu.py), started and asked for by the channel's thread.

    `device`: GpuRows. `prepare`: the job as the device takes it; may raise, and the job fails.
    """

    is_alive = True

    def __init__(self, device: Any, prepare: Callable[[Any], DeviceJob]) -> None:
        self._device, self._prepare = device, prepare
        self._waiting: deque[tuple[Any, DeviceJob]] = deque()
        self._flying: deque[tuple[Any, list[tuple[Any, DeviceJob]], float]] = deque()
        self._ended: list[Ended] = []

    @property
    def polled(self) -> bool:
        return bool(self._flying or self._waiting)

    @property
    def done(self) -> bool:
        """Batches end in their order, since they run on one stream."""
        return bool(self._ended) or bool(self._flying and self._flying[0][0].done())

    def start(self, jobs: Sequence[Any]) -> None:
        for job in jobs:
            try:
                self._waiting.append((job, self._prepare(job)))
            except Exception as error:
                self._ended.append((job, error, 0.0))
        self._launch()

    def ended(self) -> list[Ended]:
        while self._flying and self._flying[0][0].done():
            ticket, batch, began = self._flying.popleft()
            seconds = (time.perf_counter() - began) / len(batch)
            for (job, device_job), found in zip(batch, ticket.results, strict=True):
                device_job.gate.ended(ticket)
                self._ended.append((job, found, seconds))
        self._launch()
        found, self._ended = self._ended, []
        return found

    def _launch(self) -> None:
        """Batches of one kind, as long as the device takes some."""
        while self._waiting and self._device.can_start:
            start, batch = self._waiting[0][1].start, list[tuple[Any, DeviceJob]]()
            while self._waiting and len(batch) < self._device.most:
                if self._waiting[0][1].start != start:
                    break
                batch.append(self._waiting.popleft())
            self._start(start, batch)

    def _start(self, start: Callable[[list[Any]], Any], batch: list[tuple[Any, DeviceJob]]) -> None:
        began, started = time.perf_counter(), list[tuple[Any, DeviceJob]]()

        def launch(is_open: list[bool]) -> Any:
            for one, passes in zip(batch, is_open, strict=True):
                if passes:
                    started.append(one)
                else:
                    self._ended.append((one[0], None, 0.0))
            return start([device_job.what for _, device_job in started]) if started else None

        try:
            ticket = start_behind([device_job.gate for _, device_job in batch], launch)
        except Exception as error:
            logger.exception("[MIXKV-SELF-01] draft KV could not be copied on the device")
            self._ended += [(job, error, 0.0) for job, _ in started]
            return
        if ticket is not None:
            self._flying.append((ticket, started, began))
