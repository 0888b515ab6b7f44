"""Copies between the draft pool and slots, each through its request's gate.

`start` begins copies; `ended` yields those that have ended. `done`: whether any copy has ended.
`polled`: whether copies in flight must be polled. `launched`: when the last batch was started.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.slot_format import SlotCheck

if TYPE_CHECKING:
    from sglang_mixkv.channel.data_plane import DataPlane
    from sglang_mixkv.draft.rows import DraftRows, Staging
    from sglang_mixkv.draft.rows_gpu import BatchTicket, GpuRows

logger = logging.getLogger(f"sglang.{__name__}")

T = TypeVar("T")

AT_ONCE = 256 << 10
"""Bytes up to which `start` makes a host copy itself: some 30 us, less than a thread would add."""


class Store(NamedTuple):
    """Draft KV's memory on a rank with a drafter: its pool, and its slots, registered with `plane`.
    `device`: the GpuRows for both, None if a host thread copies."""

    rows: DraftRows
    staging: Staging
    plane: DataPlane
    device: GpuRows | None = None


Kind = Literal["pack", "unpack", "clear"]
"""Not an enum: the hot path would look up a member per slot, 0.1 us each in CPython 3.11."""


class Copy(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A copy of `tokens` tokens of these heads, from token `first` of `pages` on: to a slot (pack),
    from a slot (unpack), or zeros for all heads (clear). `job`: the caller's name for the copy."""

    kind: Kind
    job: Any
    gate: Gate
    pages: Pages
    first: int
    tokens: int
    heads: range
    slot: int = 0
    stamp: int = 0


Outcome = SlotCheck | Exception | None
"""None: the request's gate was closed, and nothing was copied."""
Ended = tuple[Copy, Outcome, float]
"""A copy, its outcome, and its duration in seconds, or its share of its batch's duration."""


class HeldBack(list[tuple[Gate, Pages, T]]):
    """Items that wait until no forward writes their pages any more, or their gate is closed. Items
    that share a gate are released in order."""

    def release(
        self, is_unwanted: Callable[[T], bool] = lambda _: False
    ) -> list[tuple[T, Exception | None]]:
        """Remove and return the items that need not wait, or are unwanted, each with an error if it
        is unknown whether a forward still writes its pages."""
        found, held, waiting = list[tuple[T, Exception | None]](), [], set[Gate]()
        for gate, pages, item in self:
            error = None
            try:
                is_held = not is_unwanted(item) and (
                    gate in waiting or (gate.is_open and not pages.are_written())
                )
            except Exception as unknown:
                is_held, error = False, unknown
            if is_held:
                waiting.add(gate)
                held.append((gate, pages, item))
            else:
                found.append((item, error))
        self[:] = held
        return found


class Copier(ABC):
    """`moved`: called with the bytes of draft KV copied and the seconds that this took."""

    launched = float("-inf")

    def __init__(self, store: Store, moved: Callable[[int, float], None]) -> None:
        self._store, self._moved = store, moved
        self._over: list[Ended] = []  # copies that `ended` has not yet taken

    @abstractmethod
    def start(self, copies: Sequence[Copy]) -> None: ...

    def ended(self) -> Iterator[tuple[list[Any], Outcome]]:
        """Yield the jobs that have ended since the last call, with their outcomes: one list for all
        that are OK, and one for each other job."""
        made, size, seconds, ok = list[Any](), 0, 0.0, SlotCheck.OK
        over = [*self._over]
        del self._over[: len(over)]  # a host copy's thread may have added more meanwhile
        for copy, outcome, took in over:
            if outcome is not ok:
                yield [copy.job], outcome
                continue
            made.append(copy.job)
            if copy.kind != "clear":
                size, seconds = size + copy.tokens * len(copy.heads), seconds + took
        if made:
            yield made, ok
        if size:
            self._moved(size * self._store.rows.bytes_per_head, seconds)


class HostCopier(Copier):
    """Copies in one thread, since a copy in host memory occupies a core. `wake`: called by that
    thread after each copy."""

    polled = False

    def __init__(
        self, store: Store, moved: Callable[[int, float], None], name: str, wake: Callable[[], None]
    ) -> None:
        super().__init__(store, moved)
        self._wake = wake
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done = self._over
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if copy.tokens * len(copy.heads) * self._store.rows.bytes_per_head <= AT_ONCE:
                self.done.append(self._copy(copy))
            else:
                self._work.put(copy)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        self._store.rows.use_device()
        while (copy := self._work.get()) is not None:
            self.done.append(self._copy(copy))
            self._wake()

    def _copy(self, copy: Copy) -> Ended:
        """Make a copy. Never raises."""
        gate, slot, heads = copy.gate, copy.slot, copy.heads
        started, pool, staging = time.perf_counter(), self._store.rows, self._store.staging
        if not gate.enter():
            return copy, None, 0.0
        try:
            rows, found = copy.pages.rows(copy.first, copy.tokens), SlotCheck.OK
            if copy.kind == "pack":
                pool.pack(rows, heads, staging.slot(slot), copy.stamp)
            elif copy.kind == "unpack":
                found = pool.unpack(rows, heads, staging.slot(slot), copy.stamp)
            else:
                pool.clear(rows)
            return copy, found, time.perf_counter() - started
        except Exception as error:
            logger.exception("[MIXKV-SELF-01] draft KV could not be copied")
            return copy, error, 0.0
        finally:
            gate.leave()


class GpuCopier(Copier):
    """Copies on a GPU. The channel's thread starts and polls them."""

    is_alive = True

    def __init__(self, store: Store, moved: Callable[[int, float], None]) -> None:
        super().__init__(store, moved)
        assert store.device is not None
        self._device = store.device
        self._waiting: deque[tuple[Copy, Any]] = deque()  # each with its GpuJob
        self._flying: deque[tuple[BatchTicket, list[Copy], float]] = deque()

    @property
    def polled(self) -> bool:
        return bool(self._flying or self._waiting)

    @property
    def done(self) -> bool:
        """Return whether any copy has ended. Batches end in order, since they share a stream."""
        return bool(self._over) or bool(self._flying and self._flying[0][0].done())

    def start(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            try:
                self._waiting.append((copy, self._prepare(copy)))
            except Exception as error:  # only this copy fails
                logger.exception("[MIXKV-SELF-01] draft KV could not be copied on the device")
                self._over.append((copy, error, 0.0))
        self._launch()

    def _prepare(self, copy: Copy) -> Any:
        slot = () if copy.kind == "clear" else (copy.heads, copy.slot, copy.stamp)
        return self._device.job(copy.pages.on(self._device), copy.first, copy.tokens, *slot)

    def ended(self) -> Iterator[tuple[list[Any], Outcome]]:
        while self._flying and self._flying[0][0].done():
            ticket, batch, began = self._flying.popleft()
            seconds = (time.perf_counter() - began) / len(batch)
            failed = RuntimeError(ticket.error) if ticket.error else None
            if failed:
                logger.error("[MIXKV-SELF-01] a batch of draft KV copies failed: %s", failed)
            for copy, check in zip(batch, ticket.results, strict=True):
                copy.gate.ended(ticket)
                self._over.append((copy, failed or check, seconds))
        self._launch()
        yield from super().ended()

    def _launch(self) -> None:
        """Start batches, each of one kind, while the device can take them."""
        waiting, device = self._waiting, self._device
        while waiting and device.can_start:
            kind, batch = waiting[0][0].kind, list[tuple[Copy, Any]]()
            while waiting and waiting[0][0].kind is kind and len(batch) < device.max_batch:
                batch.append(waiting.popleft())
            self._start(kind, batch)

    def _start(self, kind: Kind, batch: list[tuple[Copy, Any]]) -> None:
        began, started, jobs = time.perf_counter(), list[Copy](), list[Any]()
        try:
            with ExitStack() as locked:
                for gate in dict.fromkeys(copy.gate for copy, _ in batch):
                    locked.enter_context(gate.lock)
                for copy, job in batch:
                    if copy.gate.is_open:
                        started.append(copy)
                        jobs.append(job)
                    else:
                        self._over.append((copy, None, 0.0))
                if not jobs:
                    return
                ticket = self._device.start(kind, jobs)
                for copy in started:
                    copy.gate.tickets[ticket] = None
        except Exception as error:
            logger.exception("[MIXKV-SELF-01] draft KV could not be copied on the device")
            self._over += [(copy, error, 0.0) for copy in started]
            return
        self._flying.append((ticket, started, began))
        self.launched = time.monotonic()
