"""A rank's channel thread, the same on both sides: it owns the sockets and the state machine.

    scheduler, other threads --call--> queue --+
    sockets, reads, copies, CUDA events -------+--> a machine's method --> machine.actions --> do

Each iteration handles all pending calls, then takes the machine's actions once, and again after
copies that the thread made itself. This batches work: eight slots share one message, one read and
one launch. The thread makes no decisions and raises nothing. After an error that it cannot survive,
it ends, and SGLang's scheduler stops waiting for it (`broken`).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple

from sglang_mixkv.background import stoppable
from sglang_mixkv.channel.actions import Note
from sglang_mixkv.channel.messages import DEFAULT_WEIGHTS, Open, Ready
from sglang_mixkv.channel.sockets import EventQueue, Poller
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.copier import GpuCopier, HostCopier, Store

logger = logging.getLogger(f"sglang.{__name__}")

TICK = 0.1  # seconds
ASKED = 30e-6  # seconds to poll for a device's batch, which takes 10 to 20 us


class StateMachine(Protocol):
    """The methods that a worker calls on its machine (prefill/machine.py, decode/machine.py)."""

    def advance(self, now: float) -> None: ...
    def actions(self) -> Sequence[Any]: ...
    def tick(self) -> None: ...
    def copied(self, jobs: Any, outcome: Any) -> None: ...
    def on_action_failed(self, action: Any, error: Exception) -> None: ...
    def restored(self) -> None: ...


class Reporter(Protocol):
    """The metrics and log to which a worker reports, from several threads. Raises nothing."""

    def __call__(self, note: Note) -> None: ...

    def moved(self, size: int, seconds: float) -> None:
        """Record that `size` bytes of draft KV were packed or unpacked in `seconds`."""

    def announced(self, seconds: float) -> None:
        """Record that a chunk's last READY left for a reader `seconds` after the KV was written."""

    def ended(self, handle: Any, reason: str) -> None:
        """Record that SGLang on decode proceeds with a request, or has failed it for `reason`.
        Called in the scheduler's thread."""

    def ticked(self) -> None:
        """Called in the channel thread, ten times a second."""

    weights: Callable[[], int]  # the CRC-32 of the current weight version; 0 if unknown


M = TypeVar("M", bound=StateMachine)
Ts = TypeVarTuple("Ts")
Call = tuple[Callable[..., object], tuple[Any, ...]]
"""A function for the channel thread to call, usually a method of its machine, and its arguments."""


class Worker(ABC, Generic[M]):
    """A rank's channel thread. `names`: the names of this thread and of the thread for host copies.
    The simulator replaces `_clock`."""

    names: tuple[str, str]
    _clock = staticmethod(time.monotonic)

    def __init__(self, machine: M, reporter: Reporter, times: Times, store: Store | None) -> None:
        """`store`: None on a rank without a drafter, which copies nothing."""
        self._machine, self._reporter, self._store = machine, reporter, store
        self._slowest = times.last_resort
        self._poller, self._queue = Poller(), EventQueue[Call]()
        self._poller.register(self._queue.fileno())
        self._copies: HostCopier | GpuCopier | None = None
        if store is not None and store.device is not None:
            self._copies = GpuCopier(store, reporter.moved)
        elif store is not None:
            self._copies = HostCopier(store, reporter.moved, self.names[1], self._queue.wake)
        self._ticked, self._stopping = 0.0, False
        self._thread = threading.Thread(target=self._run, name=self.names[0], daemon=True)
        stoppable.add(self)

    def stop(self) -> None:
        """Have both threads end, without waiting. Copies in flight complete first."""
        self._stopping = True
        self._queue.wake()

    def restored(self) -> None:
        """Stop using the data plane, since the process was restored from a snapshot."""
        self._call(self._machine.restored)
        if self._store is not None:
            self._store.plane.dead = True

    @property
    def broken(self) -> bool:
        """Return whether a thread of the channel has ended."""
        copies = self._copies
        return not (self._thread.is_alive() and (copies is None or copies.is_alive))

    def _call(self, method: Callable[[*Ts], object], *args: *Ts, wake: bool = True) -> None:
        """Queue a call for the channel thread, which then carries out the machine's actions.
        `wake`: see EventQueue.put."""
        self._queue.put((method, args), wake)

    # -- the channel thread

    def _compare(self, message: Open | Ready, peer: bytes = b"") -> None:
        """Count whether both ranks have the same weights; unknown if both have SGLang's default."""
        theirs, ours = message.weights, self._reporter.weights()
        found = "same" if theirs == ours else "different"
        if not (ours and theirs) or ours == theirs == DEFAULT_WEIGHTS:
            found = "unknown"
        self._reporter(Note(f"weights_{found}", peer))

    @abstractmethod
    def _must_poll(self) -> bool:
        """Return whether work other than copies is in flight that no file descriptor reports."""

    @abstractmethod
    def _poll(self, ready: list[Any]) -> Iterable[Call]:
        """Return the calls for all events except ended copies. `ready`: sockets with messages."""

    @abstractmethod
    def _do(self, action: Any) -> None:
        """Carry out an action of the machine."""

    def _run(self) -> None:
        try:
            if self._store is not None:
                self._store.rows.use_device()
            while not self._stopping:
                polled = self._copies is not None and self._copies.polled
                self._take(self._calls(self._poller.wait(TICK, polled or self._must_poll())))
                if self._clock() - self._ticked >= TICK:  # even if every poll raises
                    self._ticked = self._clock()
                    self._take([(self._machine.tick, ()), (self._reporter.ticked, ())])
                self._act()
        except Exception:
            logger.exception("[MIXKV-SELF-01] the channel ends; drafters are cold until a restart")
        finally:
            if isinstance(self._copies, HostCopier):
                self._copies.stop()

    def _calls(self, ready: list[Any]) -> Iterator[Call]:
        """Yield the calls of one iteration. `_take` reads the clock after it obtains each call."""
        yield from self._queue.take(ready)
        yield from self._poll(ready)
        if self._copies is not None and self._copies.done:
            yield from zip(repeat(self._machine.copied), self._copies.ended())

    def _take(self, calls: Iterable[Call]) -> None:
        """Make these calls. An exception skips that call, or the rest of the iteration."""
        found, name = iter(calls), ""
        while True:
            try:
                for method, args in found:
                    name = method.__name__
                    self._machine.advance(self._clock())
                    method(*args)
                return
            except Exception:
                logger.exception("[MIXKV-SELF-01] the draft channel failed on %s", name)
                time.sleep(TICK)  # a recurring fault neither takes a core nor fills the log

    def _act(self) -> None:
        """Carry out actions, including small host copies and the actions that follow from them.
        Copies on a device are polled for as long as that takes less time than sleeping."""
        while True:
            for action in (wanted := self._machine.actions()):
                try:
                    self._do(action)
                except Exception as error:  # the other actions are still carried out
                    name = type(action).__name__
                    logger.exception("[MIXKV-SELF-01] the draft channel failed on %s", name)
                    self._call(self._machine.on_action_failed, action, error)
            if wanted:
                self._poller.came = self._clock()
            while not ((copies := self._copies) and copies.done):
                if not (copies and copies.polled and self._clock() < copies.launched + ASKED):
                    return
            self._take(zip(repeat(self._machine.copied), copies.ended()))
