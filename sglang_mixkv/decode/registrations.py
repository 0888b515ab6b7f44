"""Which prefill ranks have this decode rank's registration, and of which staging buffer they know.

SGLang registers once per prefill server. This table says when it has to be done again: the buffer
came later, or a prefill rank has no registration that it can use, or has given this rank up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sglang_mixkv.protocol.messages import is_given_up, lacks_registration

Endpoint = tuple[str, int]  # where a prefill rank listens
Span = tuple[int, int]  # address and bytes of the staging buffer

# As SGLang probes a peer that it has given up: SGLANG_FAILED_SESSION_PROBE_INTERVAL_S and
# SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S in environ.py.
FIRST_S, LAST_S = 30.0, 300.0


@dataclass
class Suspicion:
    """This rank may be given up by a server. `next`: it registers there again from then on;
    `wait_s`: so long after the last time."""

    next: float
    wait_s: float


class Registrations:
    """The scheduler registers, and notes failures as the decode thread does. A note that is lost
    to the other's costs one request: the next one's failure is noted again."""

    def __init__(self) -> None:
        self._told: dict[str, dict[Endpoint, Span]] = {}
        self._suspicions: dict[str, Suspicion] = {}

    def told(self, address: str, endpoint: Endpoint, span: Span) -> None:
        """The rank of that server at this endpoint was sent a registration."""
        self._told.setdefault(address, {})[endpoint] = span

    def lacks(self, address: str, endpoint: Endpoint, span: Span) -> bool:
        """Whether it has to be sent one before the next request."""
        return self._told.get(address, {}).get(endpoint) != span

    def failed(self, address: str, reason: str) -> None:
        """A request to that server failed; "": another rank of this server has failed it, maybe
        before a prefill rank could say that this one's registration is of no use."""
        if lacks_registration(reason):
            self._told.pop(address, None)
        elif not reason or is_given_up(reason):
            self._suspect(address)

    def worked(self, address: str) -> None:
        """A request to that server succeeded."""
        self._suspicions.pop(address, None)

    def _suspect(self, address: str) -> None:
        """Register again at once, and while requests go on failing more and more rarely: a server
        that takes back a rank which it cannot write to spends a transfer thread on each try."""
        now, known = time.monotonic(), self._suspicions.get(address)
        if known is not None and now < known.next:
            return
        wait_s = FIRST_S if known is None else min(2 * known.wait_s, LAST_S)
        self._suspicions[address] = Suspicion(now + wait_s, wait_s)
        self._told.pop(address, None)
