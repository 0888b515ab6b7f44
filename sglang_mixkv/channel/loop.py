"""The channel thread of a rank, the same on both sides: it owns the sockets and the state machine.

    scheduler, other threads --put--> inlet --+
    sockets, reads, copies, CUDA events ------+--> machine.handle --> machine.actions --> do

One look takes all that has come and asks for actions once, so that what came together leaves
together: eight slots are one message, one read, one launch. The thread decides nothing and raises
nothing. If it could not go on, `broken` is set and SGLang's scheduler waits for nothing any more.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from sglang_mixkv.channel.copies import Copies
from sglang_mixkv.channel.reporter import Reporter
from sglang_mixkv.channel.sockets import AdaptivePoll, Inlet, Poller

logger = logging.getLogger(f"sglang.{__name__}")

TICK = 0.1  # seconds

Event = TypeVar("Event")
Action = TypeVar("Action")


class Machine(Protocol):
    """A state machine without I/O. Times are seconds of one clock."""

    def handle(self, event: Any, now: float) -> None: ...

    def actions(self) -> list[Any]:
        """What is to be done, in this order. Asked after each batch of events."""

    def left(self) -> dict[str, int]: ...


class Worker(ABC, Generic[Event, Action]):
    """`tick`: the machine's event that time has passed. `failed`: makes its event that an action
    raised."""

    name: str
    tick: Any
    failed: Any

    def __init__(
        self,
        machine: Machine,
        poller: Poller,
        reporter: Reporter,
        slowest: float,
    ) -> None:
        """`slowest`: seconds after SGLang's own transfer in which the channel has come to an end
        with a request; then SGLang's scheduler does it."""
        self._machine, self._reporter, self._slowest = machine, reporter, slowest
        self._poll = AdaptivePoll(poller, TICK)
        self._inlet: Inlet[Any] = Inlet()
        poller.register(self._inlet.fileno())
        self._copies: Copies | None = None
        self._broken, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

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

    def _stop(self) -> None:
        self._stopping = True
        self._inlet.wake()
        self._thread.join(2)
        if self._copies is not None:
            self._copies.close()

    # -- the channel thread

    @abstractmethod
    def _begin(self) -> None:
        """Once, in this thread."""

    @abstractmethod
    def _outstanding(self) -> bool:
        """Whether something beside copies is under way whose end makes no file readable."""

    @abstractmethod
    def _look(self, ready: list[Any]) -> Iterable[Event]:
        """What has come. `ready`: sockets with messages."""

    @abstractmethod
    def _copied(self) -> Iterable[Event]:
        """Copies that have ended."""

    @abstractmethod
    def _do(self, action: Action) -> None: ...

    def _run(self) -> None:
        ticked = 0.0
        try:
            self._begin()
            while not self._stopping:
                polled = self._copies is not None and self._copies.polled
                ready = self._poll.wait(polled or self._outstanding())
                self._take(self._inlet.take(ready))
                self._take(self._look(ready))
                if self._copies is not None and self._copies.done:
                    self._take(self._copied())
                if time.monotonic() - ticked >= TICK:
                    ticked = time.monotonic()
                    self._take([self.tick])
                    self._reporter.ticked()
                self._act()
        except Exception:
            logger.exception("[MIXKV-SELF-01] the draft channel of this rank ends")
        finally:
            self._broken.set()

    def _take(self, events: Iterable[Event]) -> None:
        """What raises is the loss of one event, or of the rest of one look; it ends no channel."""
        found, event = iter(events), None
        while True:
            try:
                for event in found:
                    self._handle(event)
                return
            except Exception:
                logger.exception("[MIXKV-SELF-01] the draft channel failed over %r", type(event))
                time.sleep(TICK)  # what fails again and again takes no core, and fills no log

    def _handle(self, event: Event) -> None:
        self._machine.handle(event, time.monotonic())

    def _act(self) -> None:
        """Small copies are made at once, and what follows from them too."""
        while True:
            for action in self._machine.actions():
                try:
                    self._do(action)
                except Exception as error:  # the other actions are done all the same
                    name = type(action).__name__
                    logger.exception("[MIXKV-SELF-01] the draft channel failed over %s", name)
                    self._inlet.put(self.failed(action, repr(error)[:300]))
            if self._copies is None or not self._copies.done:
                return
            self._take(self._copied())


def is_done(event: Any) -> bool:
    """A CUDA event, asked without waiting."""
    try:
        return bool(event.query())
    except Exception:  # a CUDA error: whoever copies will meet it as well
        return True
