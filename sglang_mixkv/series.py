"""The draft channel's Prometheus series.

Label values that are known beforehand exist from the rank's start, at 0. A prefill address appears
with its first room, and where requests finish with the first of a state and reason; a position
with its first draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_mixkv.errors import REASONS

PREFILL, DECODE = "prefill", "decode"
BOTH = (PREFILL, DECODE)
Values = tuple[str, ...]

MAX_PREFILLS = 64  # addresses with series of their own; those that come later are OTHER
MAX_POSITIONS = 32  # of a draft; positions behind are not counted
OTHER = "other"

COLD = (
    "deadline", "breaker", "lost", "read", "slots", "stalled", "stale", "unpack", "protocol",
    "broken", "mismatch", "no_drafter", "prefill_aborted", "prefill_pack", "prefill_slow",
    "prefill_heads", "prefill_full", "prefill_restarted", "prefill_other", OTHER,
)  # fmt: skip
"""Why a decode rank's room is cold: all reasons that its code has, and one for any other."""

FAILS = ("aborted", "pack", "slow", "heads", "full", "restarted")
"""Codes of the FAIL messages that a prefill rank sends."""

OUTCOMES = (("warm", ""), *(("cold", reason) for reason in COLD), ("failed", ""), ("closed", ""))
STATES = ("warm", "cold", "retracted")
DRAFT = ("prefill", "state", "reason")
"""Labels of how a request's drafter began. Positions have no `prefill`: 32 times as many series."""


@dataclass(frozen=True)
class Family:
    """One metric. `values`: of its labels, those that exist from the start."""

    name: str
    help: str
    sides: Values = BOTH
    labels: Values = ()
    values: tuple[Values, ...] = ((),)

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def _each(values: Values) -> tuple[Values, ...]:
    return tuple((value,) for value in values)


ROOMS = Family(
    "sglang:mixkv_rooms_total",
    "Requests on this rank, by how their drafter began; `closed`: they ended first.",
    (DECODE,), ("state", "reason"), OUTCOMES,
)  # fmt: skip
PREFILL_ROOMS = Family(
    "sglang:mixkv_prefill_rooms_total",
    "The same by prefill server, its bootstrap address.",
    (DECODE,), DRAFT, (),
)  # fmt: skip
FINISHED = Family(
    "sglang:mixkv_finished_requests_total",
    "Requests that have ended after their transfer, each once.",
    (DECODE,), DRAFT, (),
)  # fmt: skip
VERIFY_ROUNDS = Family(
    "sglang:mixkv_verify_rounds_total",
    "Their verify rounds.",
    (DECODE,), DRAFT, (),
)  # fmt: skip
ACCEPTED_TOKENS = Family(
    "sglang:mixkv_accepted_tokens_total",
    "Tokens of these rounds: accepted drafts, and one more each.",
    (DECODE,), DRAFT, (),
)  # fmt: skip
ACCEPTED_DRAFTS = Family(
    "sglang:mixkv_accepted_drafts_total",
    "Rounds that accepted the draft at this position.",
    (DECODE,), ("state", "position"), (),
)  # fmt: skip
SUSPECT = Family(
    "sglang:mixkv_draft_suspect",
    "1 while warm requests of this server accept less than they should.",
    (DECODE,), ("prefill", "against"), (),
)  # fmt: skip
BREAKER_OPEN = Family(
    "sglang:mixkv_breaker_open",
    "1 while the breaker of one of the server's ranks is open.",
    (DECODE,), ("prefill",), (),
)  # fmt: skip
BREAKER_OPENED = Family(
    "sglang:mixkv_breaker_opened_total",
    "How often one opened.",
    (DECODE,), ("prefill",), (),
)  # fmt: skip
REFUSED = Family(
    "sglang:mixkv_peers_refused_total",
    "Requests that failed since their prefill server is refused.",
    (DECODE,), ("reason",), _each(REASONS),
)  # fmt: skip
NEEDED_BYTES = Family(
    "sglang:mixkv_needed_bytes_total",
    "KV bytes put in place.",
    (DECODE,), ("component",), (("draft",),),
)  # fmt: skip
SENT_BYTES = Family(
    "sglang:mixkv_sent_bytes_total",
    "KV bytes packed.",
    (PREFILL,), ("component",), (("draft",),),
)  # fmt: skip
UNOPENED = Family(
    "sglang:mixkv_unopened_rooms_total",
    "Requests that a decode rank did not open on the channel.",
    (PREFILL,),
)  # fmt: skip
UNREQUESTED = Family(
    "sglang:mixkv_unrequested_rooms_total",
    "Rooms opened for which no request came.",
    (PREFILL,),
)  # fmt: skip
FAILS_SENT = Family(
    "sglang:mixkv_fails_sent_total",
    "Rooms refused or given up, which go cold on decode.",
    (PREFILL,), ("code",), _each(FAILS),
)  # fmt: skip
EXPIRED_SLOTS = Family(
    "sglang:mixkv_expired_slots_total",
    "Slots set aside for 60 s, as no ACK came.",
    (PREFILL,),
)  # fmt: skip
COPY_SECONDS = Family("sglang:mixkv_copy_seconds_total", "Seconds spent packing or unpacking.")
SLOTS = Family("sglang:mixkv_slots", "Slots of the staging buffer.")
SLOTS_USED = Family("sglang:mixkv_slots_used", "Those in use.")
DROPPED = Family(
    "sglang:mixkv_messages_dropped_total", "Messages that were unreadable, doubled or too late."
)

FAMILIES = (
    ROOMS, PREFILL_ROOMS, FINISHED, VERIFY_ROUNDS, ACCEPTED_TOKENS, ACCEPTED_DRAFTS, SUSPECT,
    BREAKER_OPEN, BREAKER_OPENED, REFUSED, NEEDED_BYTES, SENT_BYTES, UNOPENED, UNREQUESTED,
    FAILS_SENT, EXPIRED_SLOTS, COPY_SECONDS, SLOTS, SLOTS_USED, DROPPED,
)  # fmt: skip


def of_side(side: str) -> Iterator[Family]:
    return (family for family in FAMILIES if side in family.sides)
