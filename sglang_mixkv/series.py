"""The plugin's Prometheus series, and what each note of a state machine is counted as.

This module imports neither SGLang nor prometheus_client: `python -m sglang_mixkv status` reads the
same tables outside a server.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple, Self

from sglang_mixkv.errors import REASONS

PREFILL, DECODE = "prefill", "decode"
PREFIX = "sglang:mixkv_"
Values = tuple[str, ...]

OTHER = "other"
ABORTED = "Aborted by prefill."
"""The failure reason on decode of a request that SGLang's prefill has aborted."""
STATES = ("warm", "cold", "retracted")
"""How the drafter of a request that decode has finished began."""


class NoteSpec(NamedTuple):
    """The series of a note, and the log's line for the first of a peer. `series`: "" where the
    room is counted when SGLang ends it. `message` and `remedy` make a sentence with the peer in
    front; a note without them is not logged. `logged`: False where the log says it already, with
    the facts that differ, the reasons before, or a traceback."""

    message: str = ""
    remedy: str = ""
    series: str = ""
    values: Values = ()
    code: str = "MIXKV-PAIR-06"
    consequence: str = "the drafter starts cold: output right, fewer drafts accepted"
    logged: bool = True


NETWORK = "Look at the network between the two, and at their load"
REPORT = "Report it with both logs"
MEMORY = "Raise --mixkv-staging-mb"
SAME_DRAFTER = "Give both sides the same drafter"
TRACEBACK = "Its reason is in this log"
_FAIL, _DROPPED = "fails_sent_total", "messages_dropped_total"


class ColdReason(StrEnum):
    """The reason why a decode rank's room is cold: its name in metrics and in a FAIL, and its
    `spec` for the log. A name that is none of these is OTHER."""

    spec: NoteSpec

    def __new__(cls, name: str, message: str = "", remedy: str = "", logged: bool = True) -> Self:
        one = str.__new__(cls, name)
        one._value_, one.spec = name, NoteSpec(message, remedy, logged=logged)
        return one

    @classmethod
    def _missing_(cls, value: object) -> ColdReason:
        return cls.OTHER

    # fmt: off
    DEADLINE = "deadline", "draft KV did not come in time", NETWORK
    LOST = ("lost", "the channel's connection is lost",
            "Is it up? Its port (SGLANG_MIXKV_PORT) must be open")
    READ = "read", "its staging buffer could not be read", NETWORK
    SLOTS = "slots", "no slot of this rank was free", MEMORY
    STALLED = "stalled", "this process was stalled", "Look at the load of this host"
    STALE = "stale", "the slot no longer held what was announced", REPORT
    UNPACK = "unpack", "draft KV could not be unpacked", TRACEBACK
    PROTOCOL = "protocol", "an announcement that does not fit", REPORT
    PREFILL_PACK = "prefill_pack", "prefill could not pack", "See prefill's log"
    PREFILL_SLOW = "prefill_slow", "prefill gave up packing", "Look at prefill's load, and its log"
    PREFILL_HEADS = "prefill_heads", "prefill does not serve these heads", MEMORY + " on prefill"
    PREFILL_FULL = "prefill_full", "too many rooms without a request", "See prefill's log"
    PREFILL_RESTARTED = "prefill_restarted", "it was restarted", "Nothing: it is resolved again"
    PREFILL_OTHER = "prefill_other", "prefill refused for a reason of a later release", REPORT
    NO_DRAFTER = "no_drafter", "one side runs without a drafter", SAME_DRAFTER, False
    MISMATCH = "mismatch", "the two sides' differ", SAME_DRAFTER, False
    BREAKER = ("breaker", "three requests in a row had no draft KV",
               "The other reasons say why", False)
    PREFILL_ABORTED = ("prefill_aborted", "prefill aborted them",
                       "Nothing: their clients went away", False)
    REPEATED = ("repeated", "their room number was reused, and its last request was not warm",
                "Nothing", False)
    UNSENT = "unsent", "a message of the room could not be made", TRACEBACK, False
    BROKEN = "broken", "the channel did not decide in time, or has ended", "See decode's log", False
    OTHER = "other", "a reason that this release does not know", REPORT, False
    # fmt: on


Cold = ColdReason | Literal[""]
"""A request's reason; "" while it is not cold."""

NOTES: dict[str, NoteSpec] = {
    **{reason: reason.spec for reason in ColdReason},
    # on decode: anything else
    "breaker_opened": NoteSpec(
        "three requests in a row without draft KV", NETWORK, "breaker_opened_total",
        consequence="its requests start cold at once, but for a probe after 1, 2, ... 30 s",
    ),
    "not_cleared": NoteSpec(
        "draft rows could not be cleared", TRACEBACK,
        code="MIXKV-SELF-01", consequence="the request fails",
    ),
    "doubled": NoteSpec(series=_DROPPED),
    "reused": NoteSpec(series="rooms_total", values=("failed", "reused")),
    # on prefill: codes of FAIL
    "aborted": NoteSpec("", "", _FAIL, ("aborted",)),
    "pack": NoteSpec("draft KV could not be packed", TRACEBACK, _FAIL, ("pack",)),
    "slow": NoteSpec(
        "packing made no progress in time", MEMORY + ", or lower the load", _FAIL, ("slow",)
    ),
    "heads": NoteSpec("heads that cannot be served", MEMORY, _FAIL, ("heads",)),
    "full": NoteSpec("a decode rank has too many unrequested rooms", REPORT, _FAIL, ("full",)),
    "restarted": NoteSpec("", "", _FAIL, ("restarted",)),
    # on prefill: anything else
    "unopened": NoteSpec(
        "a decode rank did not open the request",
        "Start decode with --enable-mixkv; if it has it, open the channel's port",
        "unopened_rooms_total",
    ),
    "early": NoteSpec(series="unrequested_rooms_total"),
    "expired": NoteSpec(
        "a slot that nobody acknowledged", NETWORK, "expired_slots_total",
        code="MIXKV-MSG-02", consequence="it was set aside",
    ),
    "unknown_ack": NoteSpec(series=_DROPPED),
    # on both
    "unreadable": NoteSpec(
        "a message that cannot be read", "Install the same release on both sides", _DROPPED,
        code="MIXKV-MSG-01", consequence="it is dropped",
    ),
}  # fmt: skip
"""By the note's `what`."""

FAILS = {
    what: ColdReason(f"prefill_{what}") for what, note in NOTES.items() if note.series == _FAIL
}
"""Codes of the FAIL messages that a prefill rank sends, and what they make a room on decode."""


class Series(NamedTuple):
    """One metric, by its name after PREFIX; those that end in _total are counters, in _seconds
    histograms, the others gauges. `initial_labels`: the label values that exist from the rank's
    start, at 0. The others appear when they are first counted."""

    name: str
    sides: Values
    help: str
    labels: Values = ()
    initial_labels: tuple[Values, ...] = ((),)


_BOTH = (PREFILL, DECODE)
_DRAFT = ("prefill", "state", "reason")
"""Labels of how a request's drafter began."""

SERIES = (
    Series(
        "rooms_total", (DECODE,),
        "Requests on this rank, by how their drafter began; `closed`: they ended first.",
        ("state", "reason"),
        (("warm", ""), *(("cold", reason) for reason in ColdReason), ("failed", ""),
         ("failed", "reused"), ("closed", ""), ("closed", "prefill_aborted")),
    ),
    Series("prefill_rooms_total", (DECODE,), "The same by prefill server.", _DRAFT, ()),
    Series(
        "wait_seconds", (DECODE,), "From the target's arrival to the verdict.", _DRAFT[1:],
        (("warm", ""),),
    ),
    Series("finished_requests_total", (DECODE,), "Decoded requests that have ended.", _DRAFT, ()),
    Series("verify_rounds_total", (DECODE,), "Their verify rounds.", _DRAFT, ()),
    Series("accepted_tokens_total", (DECODE,), "Accepted drafts, plus one a round.", _DRAFT, ()),
    Series("breaker_open", (DECODE,), "1 while a breaker is open.", ("prefill",), ()),
    Series("breaker_opened_total", (DECODE,), "How often one opened.", ("prefill",), ()),
    Series(
        "peers_refused_total", (DECODE,),
        "Requests that failed because their prefill server is refused.", ("reason",),
        tuple((reason,) for reason in REASONS),
    ),
    Series(
        "needed_bytes_total", (DECODE,), "KV bytes put in place.", ("component",), (("draft",),)
    ),
    Series("ready_seconds", (PREFILL,), "From a chunk's forward to its READY, for each reader."),
    Series("sent_bytes_total", (PREFILL,), "KV bytes packed.", ("component",), (("draft",),)),
    Series("unopened_rooms_total", (PREFILL,), "Requests that a decode rank did not open."),
    Series("unrequested_rooms_total", (PREFILL,), "Rooms opened for which no request came."),
    Series(
        "fails_sent_total", (PREFILL,),
        "Rooms refused or given up, which go cold on decode.", ("code",),
        tuple((code,) for code in FAILS),
    ),
    Series("expired_slots_total", (PREFILL,), "Slots set aside, since no ACK came."),
    Series("copy_seconds_total", _BOTH, "Seconds spent packing or unpacking."),
    Series("gpu_kernels", _BOTH, "On a GPU: 1 where kernels copy, 0 where torch does.", (), ()),
    Series("slots", _BOTH, "Slots of the staging buffer."),
    Series("slots_used", _BOTH, "Those in use."),
    Series("messages_dropped_total", _BOTH, "Messages that were unreadable, doubled or too late."),
)  # fmt: skip
