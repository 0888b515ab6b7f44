"""The gate of a request on one rank: its rows are read and written only while the gate is open.

SGLang gives a request's pages back once it knows that the request is over: on decode after `clear`,
which its `failure_exception` calls too; on prefill after `clear`, `abort`, `failure_exception`, or
a poll that returned Success. Pages that were given back are another request's, or not mapped while
the memory saver has released the pool. So a copy enters the gate before its first byte and leaves
it after its last one, and the gate is closed before pages are given back. Closing waits for the
copies in flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

logger = logging.getLogger(f"sglang.{__name__}")

SLOW_S = 1.0  # a slower close is logged; the pages stay in use until it is done


class Ticket(Protocol):
    """Copies on a device, which end without any thread. Any thread may ask for their end."""

    def over(self) -> bool:
        """True if they have ended; it does not wait."""


class Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()  # made from a Lock, it takes three times as long
        self._open, self._in_flight = True, 0
        self._tickets: dict[Ticket, None] = {}

    def enter(self) -> bool:
        """Begin a copy. False once the gate is closed; otherwise `leave` must follow."""
        with self._changed:
            self._in_flight += self._open
            return self._open

    def leave(self) -> None:
        with self._changed:
            self._in_flight -= 1
            if not (self._open or self._in_flight):
                self._changed.notify_all()

    def ended(self, ticket: Ticket) -> None:
        """Forget a ticket of `launch_guarded`: its copies have ended."""
        with self._changed:
            self._tickets.pop(ticket, None)

    def close(self) -> None:
        """Let no copy begin from here on, and wait for those in flight: two batches of slots at
        most. It does not wait if there are none."""
        if self.try_close():
            return
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight)
            tickets = list(self._tickets)
        for ticket in tickets:
            while not ticket.over():
                time.sleep(1e-4)
        if time.monotonic() - began > SLOW_S:
            logger.warning(
                "[MIXKV-SELF-01] SGLang's scheduler waited %.1f s for copies of draft KV, since "
                "they must end before pages go back", time.monotonic() - began,
            )  # fmt: skip

    def try_close(self) -> bool:
        """Let no copy begin from here on. True if none is in flight; it does not wait."""
        with self._changed:
            self._open = False
            return not self._in_flight and all(ticket.over() for ticket in self._tickets)


def launch_guarded(gates: Iterable[Gate], start: Callable[[list[bool]], Any]) -> Any:
    """Launch copies of several requests on a device. `start` is told for each gate whether it is
    open, starts only the copies of open ones, and returns their Ticket, or None if there are none.
    The gates are checked, and get the ticket, under all of their locks: a gate that closes either
    waits for the ticket, or its copies were not started."""
    gates = list(gates)
    with ExitStack() as stack:
        for gate in dict.fromkeys(gates):
            stack.enter_context(gate._changed)
        ticket = start([gate._open for gate in gates])
        if ticket is not None:
            for gate in gates:
                if gate._open:
                    gate._tickets[ticket] = None
        return ticket
