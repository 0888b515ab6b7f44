"""The channel thread of a rank, the same on both sides: it owns the sockets and the state machine.

    scheduler, other threads --call--> queue --+
    sockets, reads, copies, CUDA events -------+--> a machine's method --> machine.actions --> do

An iteration takes all that has come and asks for actions once, and again after copies that it made
itself, so that what came together leaves together: eight slots are one message, one read, one
launch. The thread decides nothing and raises nothing. If it cannot go on it ends, and SGLang's
scheduler no longer waits for it (`broken`).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from sglang_mixkv.channel.reporter import Reporter
from sglang_mixkv.channel.sockets import EventQueue, Poller
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.copier import Store

logger = logging.getLogger(f"sglang.{__name__}")

TICK = 0.1  # seconds
ASKED = 30e-6  # seconds; a batch on a device takes 10 to 20 us


class StateMachine(Protocol):
    """What a worker asks of its machine (prefill/machine.py, decode/machine.py)."""

    def advance(self, now: float) -> None: ...
    def actions(self) -> Sequence[Any]: ...
    def tick(self) -> None: ...
    def copied(self, jobs: Any, outcome: Any) -> None: ...
    def on_action_failed(self, action: Any, error: Exception) -> None: ...


Call = tuple[Callable[..., object], tuple[Any, ...]]
"""What the channel thread calls, and with what: as a rule a method of its machine."""


class Worker(ABC):
    """`machine`: a state machine without I/O; its `actions` are carried out in order after each
    batch of calls. `names`: of this thread, and of the one that copies. Both end with the process.
    """

    names: tuple[str, str]

    def __init__(
        self, machine: StateMachine, reporter: Reporter, times: Times, store: Store | None
    ) -> None:
        """`store`: None on a rank without a drafter, which copies nothing."""
        self._machine, self._reporter, self._store = machine, reporter, store
        self._slowest = times.last_resort
        self._poller, self._queue = Poller(), EventQueue[Call]()
        self._poller.register(self._queue.fileno())
        self._copies = store and store.copier(self.names[1], self._queue.wake, reporter.moved)
        self._ticked, self._stopping = 0.0, False
        self._thread = threading.Thread(target=self._run, name=self.names[0], daemon=True)

    @property
    def broken(self) -> bool:
        """True if a thread of the channel has ended."""
        copies = self._copies
        return not (self._thread.is_alive() and (copies is None or copies.is_alive))

    def _call(self, method: Callable[..., object], *args: Any, wake: bool = True) -> None:
        """Have the channel thread call this, after earlier calls, and then carry out the machine's
        actions. `wake`: see EventQueue.put."""
        self._queue.put((method, args), wake)

    # -- the channel thread

    @abstractmethod
    def _must_poll(self) -> bool:
        """True if something besides copies is under way whose end makes no file readable."""

    @abstractmethod
    def _poll(self, ready: list[Any]) -> Iterable[Call]:
        """Calls for what has come besides copies. `ready`: sockets with messages."""

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
                if time.monotonic() - self._ticked >= TICK:  # also where each poll raises
                    self._ticked = time.monotonic()
                    self._take([(self._machine.tick, ()), (self._reporter.ticked, ())])
                self._act()
        except Exception:
            logger.exception("[MIXKV-SELF-01] the channel ends; drafters are cold until a restart")

    def _calls(self, ready: list[Any]) -> Iterator[Call]:
        """The calls of one iteration. The time of a call is taken after the call is obtained."""
        yield from self._queue.take(ready)
        yield from self._poll(ready)
        if self._copies is not None and self._copies.done:
            yield from self._copied()

    def _copied(self) -> Iterator[Call]:
        for ended in self._copies.ended() if self._copies else ():
            yield self._machine.copied, ended

    def _take(self, calls: Iterable[Call]) -> None:
        """Make these calls. An exception costs one of them, or the rest of one iteration."""
        found, name = iter(calls), ""
        while True:
            try:
                for method, args in found:
                    name = method.__name__
                    self._machine.advance(time.monotonic())
                    method(*args)
                return
            except Exception:
                logger.exception("[MIXKV-SELF-01] the draft channel failed on %s", name)
                time.sleep(TICK)  # a fault that repeats takes no core and does not fill the log

    def _act(self) -> None:
        """Carry out actions. Small copies are made at once, and so is what follows from them. What
        a device copies is waited for, as long as that is shorter than to sleep."""
        while True:
            for action in (actions := self._machine.actions()):
                try:
                    self._do(action)
                except Exception as error:  # the other actions are still carried out
                    name = type(action).__name__
                    logger.exception("[MIXKV-SELF-01] the draft channel failed on %s", name)
                    self._call(self._machine.on_action_failed, action, error)
            if actions:
                self._poller.came = time.monotonic()
            while not ((copies := self._copies) and copies.done):
                if not (copies and copies.polled and time.monotonic() < copies.launched + ASKED):
                    return
            self._take(self._copied())
