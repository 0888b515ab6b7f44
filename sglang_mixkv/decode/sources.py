"""Prefill servers of one decode rank, by bootstrap address: those resolved, those refused.

SGLang's scheduler resolves a server with the first request to it. One that does not fit is
refused: its requests fail one by one. An answer counts for CURRENT_S; then the server is asked
again, since it may have been restarted, in the background, and is not known meanwhile.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from sglang_mixkv.decode.source import Source
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.stats import Stats

logger = logging.getLogger(__name__)

CURRENT_S = 1.0  # an answer counts for so long, and is had again no more often
SUMMARY_S = 60.0


@dataclass
class Refusal:
    """Why one prefill server is not used, and when it said so.

    `unused`: no request has had its last answer yet. `tried`: when it was asked last, with an
    answer or without; `asking`: it is being asked. `requests`: refused since the last line about
    it was logged (`said`).
    """

    address: str
    error: Exception
    answered: float
    tried: float
    said: float
    unused: bool = True
    asking: bool = False
    requests: int = 0

    @property
    def reason(self) -> str:
        ours = isinstance(self.error, MixKVError)
        why = self.error if ours else f"[MIXKV-PAIR-07] {self.error}"
        return f"sglang-mixkv refuses prefill server {self.address}: {why}"

    def counts(self) -> bool:
        """Whether a request is refused by the last answer. It is when no other was before it, so
        that a request which had the server asked is decided by what it said."""
        if self.asking:
            return False
        current = self.unused or time.monotonic() - self.answered < CURRENT_S
        self.unused = False
        return current

    def may_be_asked(self) -> bool:
        return not self.asking and time.monotonic() - self.tried >= CURRENT_S

    def asked(self, error: Exception | None = None) -> None:
        """It was asked again: it is refused for this, or cannot be reached (or is used now)."""
        self.tried = time.monotonic()
        if error is not None:
            is_new = str(error) != str(self.error)
            self.error, self.answered, self.unused = error, self.tried, True
            if is_new:
                logger.error("%s", self.reason)
        self.asking = False

    def count(self) -> None:
        """A request was refused: logged once a minute, all together."""
        self.requests += 1
        now = time.monotonic()
        if now - self.said >= SUMMARY_S:
            logger.error("%s (%d requests since the last such line)", self.reason, self.requests)
            self.said, self.requests = now, 0


class Sources:
    """The scheduler asks; it and the background thread put in what they learn."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._sources: dict[str, Source] = {}
        self._refused: dict[str, Refusal] = {}

    def get(self, address: str) -> Source | None:
        return self._sources.get(address)

    def put(self, source: Source) -> None:
        """It fits: it is refused no longer."""
        self._sources[source.address] = source
        self._refused.pop(source.address, None)

    def refused(self, address: str) -> Refusal | None:
        return self._refused.get(address)

    def refuse(self, address: str, error: Exception) -> None:
        """A server that nothing was known of does not fit."""
        now = time.monotonic()
        refusal = self._refused[address] = Refusal(address, error, now, now, now)
        logger.error("%s", refusal.reason)

    def why_not(self, address: str) -> str | None:
        """Why a request to this server fails, None when it does not; counted."""
        refusal = self._refused.get(address)
        if refusal is None:
            return None
        self._stats.refused(refusal.error)
        refusal.count()
        return refusal.reason
