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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_mixkv.draft.cuda import Event

logger = logging.getLogger(f"sglang.{__name__}")

SLOW_S = 1.0  # a slower close is logged; the pages stay in use until it is done


class Gate:
    """`tickets`: batches on a device that copy through this gate. Whoever starts a batch holds the
    `lock` of each of its gates from the check of `is_open` until the gate has the ticket. So
    closing a gate either waits for the ticket, or came before any copy through it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_open, self._in_flight = True, 0
        self.tickets: dict[Event, None] = {}

    def enter(self) -> bool:
        """Begin a copy. Return False if the gate is closed; otherwise `leave` must follow."""
        with self.lock:
            self._in_flight += self.is_open
            return self.is_open

    def leave(self) -> None:
        with self.lock:
            self._in_flight -= 1

    def ended(self, ticket: Event) -> None:
        """Forget a ticket whose copies have ended."""
        with self.lock:
            self.tickets.pop(ticket, None)

    def close(self) -> None:
        """Bar new copies, and wait for those in flight: at most two batches of slots."""
        began = time.monotonic()
        while not self.try_close():
            time.sleep(1e-4)
        if (waited := time.monotonic() - began) > SLOW_S:
            text = "[MIXKV-SELF-01] SGLang's scheduler waited %.1f s for copies of draft KV, since "
            logger.warning(text + "they must end before pages are freed", waited)

    def try_close(self) -> bool:
        """Bar new copies. Return whether none is in flight, without waiting."""
        with self.lock:
            self.is_open = False
            return not self._in_flight and all(ticket.over() for ticket in self.tickets)
