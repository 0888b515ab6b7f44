"""Prefill servers of one decode rank, by bootstrap address: those resolved, those refused.

    unknown  -- fits -->  Source         a server that was restarted replaces it
             -- does not -->  REFUSE     its requests fail, by the last answer
    REFUSE   -- CURRENT_S later -->  ASK, then WAIT while it is asked in the background
    WAIT     -- fits -->  Source;  -- does not, or no answer -->  REFUSE

SGLang's scheduler resolves a server with the first request to it; a resolved one is asked again
when SGLang asks for addresses of its ranks. A request that had a server asked is decided by what
it said.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from enum import Enum, auto

from sglang_mixkv.decode.source import Source
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.stats import Stats

logger = logging.getLogger(__name__)

CURRENT_S = 1.0  # an answer counts for so long, and is had again no more often
SUMMARY_S = 60.0


class Next(Enum):
    """What the scheduler does about a server that is not resolved."""

    RESOLVE = auto()  # nothing is known of it: ask it now, as SGLang does
    REFUSE = auto()  # fail the request
    ASK = auto()  # have it asked in the background, and look again
    WAIT = auto()  # it is being asked, or was just now


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

    def next(self) -> Next:
        """For one request. ASK is said once: `asked` has to follow."""
        now = time.monotonic()
        if self.asking:
            return Next.WAIT
        current = self.unused or now - self.answered < CURRENT_S
        self.unused = False
        if current:
            return Next.REFUSE
        self.asking = now - self.tried >= CURRENT_S
        return Next.ASK if self.asking else Next.WAIT

    def asked(self, error: Exception | None = None) -> None:
        """It is refused for this, or could not be reached (or is used now)."""
        assert self.asking, self.address
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
        self._resolved: dict[str, float] = {}  # when they said so
        self._refused: dict[str, Refusal] = {}

    def get(self, address: str) -> Source | None:
        return self._sources.get(address)

    def put(self, source: Source) -> None:
        """It fits: it is refused no longer."""
        self._sources[source.address] = source
        self._resolved[source.address] = time.monotonic()
        self._refused.pop(source.address, None)

    def is_current(self, address: str) -> bool:
        """Whether a server was resolved just now."""
        return time.monotonic() - self._resolved[address] < CURRENT_S

    def next(self, address: str) -> Next:
        """What to do for a request to a server that SGLang does not know."""
        refusal = self._refused.get(address)
        return Next.RESOLVE if refusal is None else refusal.next()

    def is_refused(self, address: str) -> bool:
        return address in self._refused

    def asked(self, address: str, error: Exception | None = None) -> None:
        """A refused server was asked again: it is refused for `error`, or could not be reached.
        One that fits was put in."""
        refusal = self._refused.get(address)
        if refusal is not None:
            refusal.asked(error)

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
