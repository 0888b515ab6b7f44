"""Prefill servers of one decode rank, by bootstrap address: those resolved, those refused.

SGLang's scheduler resolves a server with the first request to it. One that does not fit is
refused: its requests fail one by one, and it is asked again at most every RETRY_S, since it may
have been restarted with other flags.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from sglang_mixkv.decode.source import Source
from sglang_mixkv.stats import Stats

logger = logging.getLogger(__name__)

RETRY_S = 1.0

# A refused server's reason is logged when it changes, else not more often than that.
LOG_EVERY_S = 60.0


@dataclass
class Refusal:
    """`until`: when the server is asked again; `requests`: how many it has cost since `logged`."""

    reason: str
    until: float
    logged: float
    requests: int = 0


class Sources:
    """All calls come from the scheduler, which no lock has to keep out of here."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._sources: dict[str, Source] = {}
        self._refused: dict[str, Refusal] = {}

    def get(self, address: str) -> Source | None:
        return self._sources.get(address)

    def put(self, source: Source) -> None:
        self._sources[source.address] = source
        self._refused.pop(source.address, None)

    def refuse(self, address: str, error: Exception, now: float) -> None:
        """This server does not fit. Logged once, then once a minute."""
        reason = f"sglang-mixkv refuses prefill server {address}: {error}"
        before = self._refused.get(address)
        self._stats.refused(error)
        self._sources.pop(address, None)
        refusal = Refusal(reason, now + RETRY_S, now)
        if before is not None and before.reason == reason:
            refusal.logged, refusal.requests = before.logged, before.requests
        self._refused[address] = refusal
        if refusal.logged == now:
            logger.error("%s", reason)
        elif now - refusal.logged >= LOG_EVERY_S:
            logger.error("%s (%d requests failed since)", reason, refusal.requests)
            refusal.logged, refusal.requests = now, 0

    def is_refused(self, address: str, now: float | None = None) -> bool:
        """Whether it need not be asked again yet."""
        refusal = self._refused.get(address)
        now = time.monotonic() if now is None else now
        return refusal is not None and now < refusal.until

    def refusal(self, address: str) -> str | None:
        """Why a request to this server fails; counted."""
        refusal = self._refused.get(address)
        if refusal is None:
            return None
        refusal.requests += 1
        return refusal.reason
