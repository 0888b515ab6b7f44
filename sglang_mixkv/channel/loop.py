"""The channel thread of a rank, the same on both sides: it owns the sockets and the state machine.

    scheduler, other threads --put--> inlet --+
    sockets, reads, copies, CUDA events ------+--> machine.handle --> machine.actions --> do

One look takes all that has come and asks for actions once, and again behind copies that it made
itself, so that what came together leaves together: eight slots are one message, one read, one
launch. The thread decides nothing and raises nothing. If it could not go on, `broken` is set and
SGLang's scheduler waits for nothing any more.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from sglang_mixkv.channel.copies import OK, DeviceCopies, DeviceJob, Ended, HostCopies
from sglang_mixkv.channel.reporter import Reporter
from sglang_mixkv.channel.sockets import Inlet, Poller
from sglang_mixkv.channel.times import Times

logger = logging.getLogger(f"sglang.{__name__}")

TICK = 0.1  # seconds

Event = TypeVar("Event")
Action = TypeVar("Action")


class Worker(ABC, Generic[Event, Action]):
    """`machine`: a state machine without I/O; its `actions` are asked for after each batch of
    events, and done in their order. `tick`: its event that time has passed. `undone`: its event, if
    it needs one, that stands for an action that raised. `moves`: the jobs that move draft KV.
    `names`: of the thread, and of the one that copies. The threads end with the process."""

    names: tuple[str, str]
    tick: Any
    undone: Callable[[Any, str], Any]
    moves: type

    def __init__(
        self, machine: Any, poller: Poller, reporter: Reporter, times: Times, store: Any
    ) -> None:
        """`store`: of draft/rows.py; None on a rank without a drafter, which copies nothing."""
        self._machine, self._poller, self._reporter = machine, poller, reporter
        self._store = store
        self._slowest = times.last_resort
        self._inlet: Inlet[Any] = Inlet()
        poller.register(self._inlet.fileno())
        self._copies: HostCopies | DeviceCopies | None = None
        if store is not None and store.device is not None:
            self._copies = DeviceCopies(store.device, self._prepare)
        elif store is not None:
            self._copies = HostCopies(
                self.names[1], self._copy, self._size_of, self._inlet.wake, store.rows.use_device
            )
        self._broken, self._stopping = threading.Event(), False
        self._ticked = 0.0
        self._thread = threading.Thread(target=self._run, name=self.names[0], daemon=True)

    @property
    def broken(self) -> bool:
        """Whether a thread of the channel has ended."""
        return self._broken.is_set() or not (self._copies is None or self._copies.is_alive)

    def left(self) -> dict[str, int]:
        return self._machine.left()

    def check(self) -> list[str]:
        """What is wrong with an idle rank."""
        found = ["a thread of the draft channel has ended"] if self.broken else []
        left = {name: count for name, count in self.left().items() if name != "offered"}
        return found + [f"{count} {name} left" for name, count in left.items()]

    # -- the channel thread

    @abstractmethod
    def _outstanding(self) -> bool:
        """Whether something beside copies is under way whose end makes no file readable."""

    @abstractmethod
    def _look(self, ready: list[Any]) -> Iterable[Event]:
        """The events that have come. `ready`: sockets with messages."""

    @abstractmethod
    def _do(self, action: Action) -> None: ...

    def _run(self) -> None:
        try:
            if self._store is not None:
                self._store.rows.use_device()
            while not self._stopping:
                polled = self._copies is not None and self._copies.polled
                self._take(self._events(self._poller.wait(TICK, polled or self._outstanding())))
                self._take(self._ticks())
                self._act()
        except Exception:
            logger.exception("[MIXKV-SELF-01] the channel ends; drafters are cold until a restart")
        finally:
            self._broken.set()

    def _events(self, ready: list[Any]) -> Iterator[Event]:
        """Those of one look. Each is obtained before the time is taken at which it is handled."""
        yield from self._inlet.take(ready)
        yield from self._look(ready)
        if self._copies is not None and self._copies.done:
            yield from self._copied()

    def _ticks(self) -> Iterator[Event]:
        """Apart from the others: a look that raises again and again stops no clock."""
        if time.monotonic() - self._ticked >= TICK:
            self._ticked = time.monotonic()
            yield self.tick
            self._reporter.ticked()

    def _take(self, events: Iterable[Event]) -> None:
        """An exception costs one event, or the rest of one look, and does not end the channel."""
        found, event = iter(events), None
        while True:
            try:
                for event in found:
                    self._handle(event)
                return
            except Exception:
                logger.exception("[MIXKV-SELF-01] the draft channel failed over %r", type(event))
                time.sleep(TICK)  # what fails again and again takes no core, and fills no log

    @abstractmethod
    def _handle(self, event: Event) -> None:
        """Give it to the machine."""

    def _act(self) -> None:
        """Carry out actions. Small copies are made at once, and so is what follows from them."""
        while True:
            for action in self._machine.actions():
                try:
                    self._do(action)
                except Exception as error:  # the other actions are done all the same
                    name = type(action).__name__
                    logger.exception("[MIXKV-SELF-01] the draft channel failed over %s", name)
                    event = self.undone(action, repr(error)[:300])
                    if event is not None:
                        self._inlet.put(event)
            if self._copies is None or not self._copies.done:
                return
            self._take(self._copied())

    # -- copies, of jobs that name the `handle` of their request

    @abstractmethod
    def _size_of(self, job: Any) -> int:
        """How many bytes the job copies."""

    @abstractmethod
    def _run_on_host(self, job: Any) -> Any:
        """Make the copy; returns a SlotCheck."""

    @abstractmethod
    def _prepare(self, job: Any) -> DeviceJob:
        """The job as the device takes it. What raises fails this job alone."""

    @abstractmethod
    def _event_of(self, jobs: Sequence[Any], found: Any) -> Event:
        """The event that these jobs have ended alike, with what copies.Ended says was found."""

    def _copied(self) -> Iterator[Event]:
        """The copies that have ended: one event for all that are made."""
        assert self._copies is not None
        made, size, seconds = [], 0, 0.0
        for job, found, took in self._copies.ended():
            if found != OK:
                yield self._event_of((job,), found)
                continue
            made.append(job)
            if isinstance(job, self.moves):
                size, seconds = size + self._size_of(job), seconds + took
        if made:
            yield self._event_of(made, OK)
        if size:
            self._reporter.moved(size, seconds)

    def _copy(self, job: Any) -> Ended:
        """Copy in host memory, through the gate of its request."""
        gate, started = job.handle.gate, time.perf_counter()
        if not gate.enter():
            return job, None, 0.0
        try:
            return job, self._run_on_host(job), time.perf_counter() - started
        except Exception as error:
            logger.exception("[MIXKV-SELF-01] draft KV could not be copied")
            return job, error, 0.0
        finally:
            gate.leave()
