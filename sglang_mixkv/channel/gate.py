"""The gate of a request on one rank: rows of a pool are read and written while it is open only.

SGLang gives a request's pages back once it has been told that the request is over: on decode after
`clear`, `abort` or `failure_exception`, on prefill also after a poll that returned Success. Pages
that were given back are another request's, or not mapped at all while the memory saver has released
the pool. So whoever copies enters the gate before the first byte and leaves it after the last one,
and whoever gives pages back closes it before. Closing waits for the copies in flight.
"""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(f"sglang.{__name__}")

SLOW_S = 1.0  # a copy that takes longer is logged; the pages stay in use until it has ended


class Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._open, self._in_flight = True, 0

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

    def close(self) -> None:
        """No copy begins from here on, and none is in flight when this returns. It takes as long as
        the copies in flight, one batch of slots at most; without them it does not wait."""
        if self.shut():
            return
        with self._changed:
            if not self._changed.wait_for(self._is_idle, SLOW_S):
                logger.warning(
                    "[MIXKV-SELF-01] a copy of draft KV takes more than %.0f s: SGLang's scheduler "
                    "waits for it, since its pages must not be given back before", SLOW_S
                )  # fmt: skip
                self._changed.wait_for(self._is_idle)

    def shut(self) -> bool:
        """No copy begins from here on. Whether none is in flight; it does not wait for those."""
        with self._changed:
            self._open = False
            return self._is_idle()

    def _is_idle(self) -> bool:
        return not self._in_flight
