"""The reasons why a decode rank's request is cold. The texts for the log are in series.py."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class ColdReason(StrEnum):
    """A reason why a request is cold: its name in metrics and in a FAIL. Other names are OTHER."""

    DEADLINE = "deadline"
    LOST = "lost"
    READ = "read"
    SLOTS = "slots"
    STALLED = "stalled"
    STALE = "stale"
    UNPACK = "unpack"
    PROTOCOL = "protocol"
    PREFILL_PACK = "prefill_pack"
    PREFILL_SLOW = "prefill_slow"
    PREFILL_HEADS = "prefill_heads"
    PREFILL_FULL = "prefill_full"
    PREFILL_RESTARTED = "prefill_restarted"
    PREFILL_SNAPSHOT = "prefill_snapshot"
    PREFILL_OTHER = "prefill_other"
    NO_DRAFTER = "no_drafter"
    MISMATCH = "mismatch"
    BREAKER = "breaker"
    RESTORED = "restored"
    PREFILL_ABORTED = "prefill_aborted"
    REPEATED = "repeated"
    UNSENT = "unsent"
    BROKEN = "broken"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> ColdReason:
        return cls.OTHER


Cold = ColdReason | Literal[""]
"""The reason why a request is cold; "" while it is not."""
FAILS = {
    code: ColdReason(f"prefill_{code}")
    for code in ("aborted", "pack", "slow", "heads", "full", "restarted", "snapshot")
}
"""Maps the code of a prefill rank's FAIL to the reason of the cold request."""
