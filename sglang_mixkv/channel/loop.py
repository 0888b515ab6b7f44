"""The channel thread of a rank, the same on both sides: it owns the sockets and the state machine.

    scheduler, other threads --call--> inlet --+
    sockets, reads, copies, CUDA events -------+--> a machine's method --> machine.actions --> do

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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang_mixkv.channel.reporter import Reporter
from sglang_mixkv.channel.sockets import Inlet, Poller
from sglang_mixkv.channel.times import Times

logger = logging.getLogger(f"sglang.{__name__}")

TICK = 0.1  # seconds
ASKED = 30e-6  # seconds; a batch on a device takes 10 to 20 us

Call = tuple[Callable[..., object], tuple[Any, ...]]
"""What the channel thread calls, and with what: as a rule a method of its machine."""


class Worker(ABC):
    """`machine`: a state machine without I/O; its `actions` are asked for after each batch of
    calls, and done in their order. `names`: of the thread, and of the one that copies. The threads
    end with the process."""

    names: tuple[str, str]

    def __init__(
        self, machine: Any, poller: Poller, reporter: Reporter, times: Times, store: Any
    ) -> None:
        """`store`: of draft/copier.py; None on a rank without a drafter, which copies nothing."""
        self._machine, self._poller, self._reporter = machine, poller, reporter
        self._store = store
        self._slowest = times.last_resort
        self._inlet: Inlet[Call] = Inlet()
        poller.register(self._inlet.fileno())
        self._copies = store and store.copier(self.names[1], self._inlet.wake, reporter.moved)
        self._broken, self._stopping = threading.Event(), False
        self._ticked = 0.0
        self._thread = threading.Thread(target=self._run, name=self.names[0], daemon=True)

    @property
    def broken(self) -> bool:
        """True if a thread of the channel has ended."""
        return self._broken.is_set() or not (self._copies is None or self._copies.is_alive)

    def left(self) -> dict[str, int]:
        return self._machine.left()

    def check(self) -> list[str]:
        """Report what is wrong with an idle rank."""
        found = ["a thread of the draft channel has ended"] if self.broken else []
        left = {name: count for name, count in self.left().items() if name != "offered"}
        return found + [f"{count} {name} left" for name, count in left.items()]

    def _call(self, method: Callable[..., object], *args: Any, wake: bool = True) -> None:
        """Have the channel thread call this, behind what it was asked before. `wake`: see Inlet."""
        self._inlet.put((method, args), wake)

    # -- the channel thread

    @abstractmethod
    def _outstanding(self) -> bool:
        """True if something beside copies is under way whose end makes no file readable."""

    @abstractmethod
    def _look(self, ready: list[Any]) -> Iterable[Call]:
        """What has come beside copies. `ready`: sockets with messages."""

    @abstractmethod
    def _do(self, action: Any) -> None: ...

    def _run(self) -> None:
        try:
            if self._store is not None:
                self._store.rows.use_device()
            while not self._stopping:
                polled = self._copies is not None and self._copies.polled
                self._take(self._calls(self._poller.wait(TICK, polled or self._outstanding())))
                self._take(self._ticks())
                self._act()
        except Exception:
            logger.exception("[MIXKV-SELF-01] the channel ends; drafters are cold until a restart")
        finally:
            self._broken.set()

    def _calls(self, ready: list[Any]) -> Iterator[Call]:
        """Those of one look. Each is obtained before the time is taken at which it is made."""
        yield from self._inlet.take(ready)
        yield from self._look(ready)
        if self._copies is not None and self._copies.done:
            yield from self._copied()

    def _copied(self) -> Iterator[Call]:
        for ended in self._copies.ended():
            yield self._machine.copied, ended

    def _ticks(self) -> Iterator[Call]:
        """Apart from the others: a look that raises again and again stops no clock."""
        if time.monotonic() - self._ticked >= TICK:
            self._ticked = time.monotonic()
            yield self._machine.tick, ()
            self._reporter.ticked()

    def _take(self, calls: Iterable[Call]) -> None:
        """An exception costs one call, or the rest of one look, and does not end the channel."""
        found, name = iter(calls), ""
        while True:
            try:
                for method, args in found:
                    name = method.__name__
                    self._machine.advance(time.monotonic())
                    method(*args)
                return
            except Exception:
                logger.exception("[MIXKV-SELF-01] the draft channel failed over %s", name)
                time.sleep(TICK)  # what fails again and again takes no core, and fills no log

    def _act(self) -> None:
        """Carry out actions. Small copies are made at once, and so is what follows from them. What
        a device copies is waited for, as long as that is shorter than to sleep."""
        while True:
            for action in self._machine.actions():
                try:
                    self._do(action)
                except Exception as error:  # the other actions are done all the same
                    name = type(action).__name__
                    logger.exception("[MIXKV-SELF-01] the draft channel failed over %s", name)
                    self._call(self._machine.undone, action, error)
                self._poller.came = time.monotonic()
            while not ((copies := self._copies) and copies.done):
                if not (copies and copies.polled and time.monotonic() < copies.launched + ASKED):
                    return
            self._take(self._copied())
