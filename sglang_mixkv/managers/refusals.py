"""Prefill servers that a decode rank does not use, and how long that is taken as known."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from sglang.srt.disaggregation.common.conn import PrefillServerInfo

logger = logging.getLogger(__name__)

CURRENT_S = 1.0  # an answer counts for so long, and is had again no more often
SUMMARY_S = 60.0


def stand_in() -> PrefillServerInfo:
    """In the place of a refused server's facts, so that SGLang resolves its requests without
    asking it anything: with one DP rank the number of that is known."""
    return PrefillServerInfo(
        attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, page_size=None,
        kv_cache_dtype=None, follow_bootstrap_room=True,
    )  # fmt: skip


@dataclass
class Refusal:
    """Why one prefill server is not used, and when it said so.

    `unused`: no request has had its last answer yet. `tried`: when it was asked last, with an
    answer or without; `asking`: it is being asked. `requests`: refused since the last line about
    it was `said`.
    """

    addr: str
    error: Exception
    answered: float = field(default_factory=time.monotonic)
    unused: bool = True
    tried: float = field(default_factory=time.monotonic)
    asking: bool = False
    info: PrefillServerInfo = field(default_factory=stand_in)
    requests: int = 0
    said: float = field(default_factory=time.monotonic)

    @property
    def reason(self) -> str:
        return f"sglang-mixkv refuses prefill server {self.addr}: {self.error}"

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
            if str(error) != str(self.error):
                logger.error("sglang-mixkv refuses prefill server %s: %s", self.addr, error)
            self.error, self.answered, self.unused = error, self.tried, True
        self.asking = False

    def one_more(self) -> None:
        """A request was refused: said once a minute, all together."""
        self.requests += 1
        now = time.monotonic()
        if now - self.said >= SUMMARY_S:
            logger.error("%s (%d requests since the last such line)", self.reason, self.requests)
            self.said, self.requests = now, 0
