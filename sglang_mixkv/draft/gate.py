"""A request's gate on one rank: its rows are read and written only while the gate is open.

SGLang frees the pages of a request that has ended: on decode after `clear`, which
`failure_exception` also calls; on prefill after `clear`, `abort`, `failure_exception`, or a poll
that returned Success. Freed pages may belong to another request, or be unmapped while the memory
saver has released the pool. So a copy enters the gate before its first byte and leaves it after its
last. The gate is closed before pages are freed, and closing waits for the copies in flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

logger = logging.getLogger(f"sglang.{__name__}")

SLOW_S = 1.0  # a slower close is logged; the pages stay in use until it is done


class Ticket(Protocol):
    """Copies that a device completes by itself. Any thread may call `over`."""

    def over(self) -> bool:
        """Return whether the copies have ended, without waiting."""


class Gate:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_open, self._in_flight = True, 0
        self._tickets: dict[Ticket, None] = {}

    def enter(self) -> bool:
        """Begin a copy. Return False if the gate is closed; otherwise `leave` must follow."""
        with self._lock:
            self._in_flight += self.is_open
            return self.is_open

    def leave(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def ended(self, ticket: Ticket) -> None:
        """Forget a ticket of `launch_guarded` whose copies have ended."""
        with self._lock:
            self._tickets.pop(ticket, None)

    def close(self) -> None:
        """Bar new copies, and wait for those in flight: at most two batches of slots."""
        began = time.monotonic()
        while not self.try_close():
            time.sleep(1e-4)
        if time.monotonic() - began > SLOW_S:
            logger.warning(
                "[MIXKV-SELF-01] SGLang's scheduler waited %.1f s for copies of draft KV, since "
                "they must end before pages are freed",
                time.monotonic() - began,
            )

    def try_close(self) -> bool:
        """Bar new copies. Return whether none is in flight, without waiting."""
        with self._lock:
            self.is_open = False
            if self._in_flight or not self._tickets:
                return not self._in_flight
            return all(ticket.over() for ticket in self._tickets)


def launch_guarded(gates: Sequence[Gate], start: Callable[[list[bool]], Any]) -> Any:
    """Launch copies for several requests on a device. `start` is called with whether each gate is
    open. It starts copies only for open gates, and returns their Ticket, or None if there are none.
    All gates stay locked from the check until they hold the ticket, so closing a gate either waits
    for the ticket, or came before any copy through it."""
    with ExitStack() as stack:
        for gate in dict.fromkeys(gates):
            stack.enter_context(gate._lock)
        ticket = start([gate.is_open for gate in gates])
        if ticket is not None:
            for gate in gates:
                if gate.is_open:
                    gate._tickets[ticket] = None
        return ticket
