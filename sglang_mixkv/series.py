"""The plugin's Prometheus series, and how each note of a state machine is counted and logged.

This module imports neither SGLang nor prometheus_client, since `python -m sglang_mixkv status`
reads these tables outside a server.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple, Self

from sglang_mixkv.errors import REASONS

PREFILL, DECODE = "prefill", "decode"
PREFIX = "sglang:mixkv_"
Values = tuple[str, ...]

OTHER = "other"
ABORTED = "Aborted by prefill."  # decode's failure reason for a request that prefill aborted
STATES = ("warm", "cold", "retracted")  # how the drafter of a finished request can have begun


class NoteSpec(NamedTuple):
    """How a note is counted, and how the first from each peer is logged. `series`: "" if the room
    is counted instead, when SGLang ends it. `message` and `remedy` follow the peer's name in the
    log line; a note without them is not logged. `logged`: False if the log already has it, with
    the facts that differ, the earlier reasons, or a traceback."""

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
TRACEBACK = "See the traceback in the log"
_FAIL, _DROPPED = "fails_sent_total", "messages_dropped_total"


class ColdReason(StrEnum):
    """Why a decode rank's room is cold. The value is the reason's name in metrics and in a FAIL;
    `spec` is for the log. An unknown name becomes OTHER."""

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
    PREFILL_RESTARTED = "prefill_restarted", "it was restarted", "Nothing to do: decode reconnects"
    PREFILL_OTHER = "prefill_other", "prefill gave a reason that this release does not know", REPORT
    NO_DRAFTER = "no_drafter", "one side runs without a drafter", SAME_DRAFTER, False
    MISMATCH = "mismatch", "the two sides' drafters differ", SAME_DRAFTER, False
    BREAKER = ("breaker", "three requests in a row had no draft KV",
               "The other reasons say why", False)
    PREFILL_ABORTED = ("prefill_aborted", "prefill aborted them",
                       "Nothing to do: their clients went away", False)
    REPEATED = ("repeated", "their room number was used before, by a request that was not warm",
                "Nothing to do", False)
    UNSENT = "unsent", "a message of the room could not be made", TRACEBACK, False
    BROKEN = "broken", "the channel did not decide in time, or has ended", "See decode's log", False
    OTHER = "other", "a reason that this release does not know", REPORT, False
    # fmt: on


Cold = ColdReason | Literal[""]  # why a request is cold; "" while it is not

NOTES: dict[str, NoteSpec] = {  # by a note's `what`
    **{reason: reason.spec for reason in ColdReason},
    # on decode: other notes
    "breaker_opened": NoteSpec(
        "three requests in a row without draft KV", NETWORK, "breaker_opened_total",
        consequence="its requests start cold without waiting, except probes after 1, 2, ... 30 s",
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
    # on prefill: other notes
    "unopened": NoteSpec(
        "a decode rank did not open the request",
        "Start decode with --enable-mixkv, or, if it runs with that, open the channel's port",
        "unopened_rooms_total",
    ),
    "early": NoteSpec(series="unrequested_rooms_total"),
    "expired": NoteSpec(
        "a slot was not acknowledged", NETWORK, "expired_slots_total",
        code="MIXKV-MSG-02", consequence="it was set aside",
    ),
    "unknown_ack": NoteSpec(series=_DROPPED),
    # on both
    "unreadable": NoteSpec(
        "a message could not be read", "Install the same release on both sides", _DROPPED,
        code="MIXKV-MSG-01", consequence="it was dropped",
    ),
}  # fmt: skip

FAILS = {
    what: ColdReason(f"prefill_{what}") for what, note in NOTES.items() if note.series == _FAIL
}
"""For each code of a prefill rank's FAIL messages, the reason it gives the cold room on decode."""


class Series(NamedTuple):
    """One metric. `name` follows PREFIX; one ending in _total is a counter, in _seconds a
    histogram, any other a gauge. `initial_labels`: the label values that exist from the rank's
    start, at 0. Others appear when first counted."""

    name: str
    sides: Values
    help: str
    labels: Values = ()
    initial_labels: tuple[Values, ...] = ((),)


_BOTH = (PREFILL, DECODE)
_DRAFT = ("prefill", "state", "reason")
"""The labels that say how a request's drafter began."""

SERIES = (
    Series(
        "rooms_total", (DECODE,),
        "Requests on this rank, by how their drafter began; `closed`: they ended first.",
        ("state", "reason"),
        (("warm", ""), *(("cold", reason) for reason in ColdReason), ("failed", ""),
         ("failed", "reused"), ("closed", ""), ("closed", "prefill_aborted")),
    ),
    Series("prefill_rooms_total", (DECODE,), "As rooms_total, by prefill server.", _DRAFT, ()),
    Series(
        "wait_seconds", (DECODE,), "From the target's arrival to the verdict.", _DRAFT[1:],
        (("warm", ""),),
    ),
    Series("finished_requests_total", (DECODE,), "Decoded requests that have ended.", _DRAFT, ()),
    Series("verify_rounds_total", (DECODE,), "Verify rounds of ended requests.", _DRAFT, ()),
    Series("accepted_tokens_total", (DECODE,), "Accepted drafts, plus one per round.", _DRAFT, ()),
    Series("breaker_open", (DECODE,), "1 while a breaker is open.", ("prefill",), ()),
    Series("breaker_opened_total", (DECODE,), "Breakers opened.", ("prefill",), ()),
    Series(
        "peers_refused_total", (DECODE,),
        "Requests that failed because their prefill server was refused.", ("reason",),
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
    Series("expired_slots_total", (PREFILL,), "Slots set aside because no ACK came."),
    Series("copy_seconds_total", _BOTH, "Seconds spent packing or unpacking."),
    Series("gpu_kernels", _BOTH, "On a GPU: 1 if kernels copy, 0 if torch does.", (), ()),
    Series("slots", _BOTH, "Slots of the staging buffer."),
    Series("slots_used", _BOTH, "Slots in use."),
    Series("messages_dropped_total", _BOTH, "Messages that were unreadable, duplicate or late."),
)  # fmt: skip
