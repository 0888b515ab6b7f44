"""The plugin's Prometheus series, and how each note of a state machine is counted and logged.

This module imports neither SGLang nor prometheus_client, since `python -m sglang_mixkv status`
reads these tables outside a server.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_mixkv import __version__
from sglang_mixkv.decode.cold import FAILS, ColdReason
from sglang_mixkv.errors import REASONS

PREFILL, DECODE = "prefill", "decode"
PREFIX = "sglang:mixkv_"
Values = tuple[str, ...]

OTHER = "other"
ABORTED = "Aborted by prefill."  # decode's failure reason for a request that prefill aborted
STATES = ("warm", "cold", "retracted")  # how the drafter of a finished request started


class NoteSpec(NamedTuple):
    """The counter of a note, and the log line of the first such note from each peer. `series`: ""
    if the room is counted instead, when SGLang ends it. `message` and `remedy` follow the peer's
    name in the log line; a note without them is not logged. `logged`: False if earlier log lines
    explain it: differing facts, other reasons, or a traceback."""

    message: str = ""
    remedy: str = ""
    series: str = ""
    values: Values = ()
    code: str = "MIXKV-PAIR-06"
    consequence: str = "the drafter starts cold: correct output, fewer drafts accepted"
    logged: bool = True


NETWORK = "Look at the network between the two, and at their load"
REPORT = "Report it with both logs"
MEMORY = "Raise --mixkv-staging-mb"
SAME_DRAFTER = "Give both sides the same drafter"
TRACEBACK = "See the traceback in the log"
_DROPPED = "messages_dropped_total"
_R = ColdReason

_COLD: dict[str, tuple[str, str]] = {  # a message and a remedy by cold reason
    _R.DEADLINE: ("draft KV did not arrive in time", f"{NETWORK}. Slots full? {MEMORY}"),
    _R.LOST: ("the channel's connection is lost", "Is the server up, with SGLANG_MIXKV_PORT open?"),
    _R.READ: ("its staging buffer could not be read", NETWORK),
    _R.SLOTS: ("no slot of this rank was free", MEMORY),
    _R.STALLED: ("this process was stalled", "Look at the load of this host"),
    _R.STALE: ("the slot no longer held the announced segment", REPORT),
    _R.UNPACK: ("draft KV could not be unpacked", TRACEBACK),
    _R.PROTOCOL: ("an invalid announcement", REPORT),
    _R.PREFILL_PACK: ("prefill could not pack", "See prefill's log"),
    _R.PREFILL_SLOW: ("prefill gave up packing", "Look at prefill's load, and its log"),
    _R.PREFILL_HEADS: ("prefill does not serve these heads", MEMORY + " on prefill"),
    _R.PREFILL_FULL: ("too many rooms without a request", "See prefill's log"),
    _R.PREFILL_RESTARTED: ("it was restarted", "Nothing to do: decode reconnects"),
    _R.PREFILL_SNAPSHOT: ("it was restored from a snapshot", "Restart it"),
    _R.PREFILL_OTHER: ("prefill gave a reason unknown to this release", REPORT),
}
_EXPLAINED: dict[str, tuple[str, str]] = {  # the same, where earlier log lines explain the reason
    _R.RESTORED: ("decode was restored from a snapshot", "Restart decode"),
    _R.NO_DRAFTER: ("one side runs without a drafter", SAME_DRAFTER),
    _R.MISMATCH: ("the two sides' drafters differ", SAME_DRAFTER),
    _R.BREAKER: ("three requests in a row had no draft KV", "See the other reasons"),
    _R.PREFILL_ABORTED: ("prefill aborted them", "Nothing to do: their clients disconnected"),
    _R.REPEATED: (
        "their room number was used before, by a request that was not warm",
        "Nothing to do",
    ),
    _R.UNSENT: ("a message of the room could not be made", TRACEBACK),
    _R.BROKEN: ("the channel did not decide in time, or has ended", "See decode's log"),
    _R.OTHER: ("a reason unknown to this release", REPORT),
}
_FAILED: dict[str, tuple[str, str]] = {  # the same, on prefill, by code of FAIL
    "pack": ("draft KV could not be packed", TRACEBACK),
    "slow": ("packing made no progress in time", MEMORY + ", or lower the load"),
    "heads": ("heads that cannot be served", MEMORY),
    "full": ("a decode rank has too many unrequested rooms", REPORT),
}
NOTES: dict[str, NoteSpec] = {  # by a note's `what`
    **{reason: NoteSpec(*texts) for reason, texts in _COLD.items()},
    **{reason: NoteSpec(*texts, logged=False) for reason, texts in _EXPLAINED.items()},
    **{one: NoteSpec(*_FAILED.get(one, ("", "")), "fails_sent_total", (one,)) for one in FAILS},
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
    # on prefill: other notes
    "unopened": NoteSpec(
        "a decode rank did not open the request",
        "Start decode with --enable-mixkv, or, if it has that flag, open the channel's port",
        "unopened_rooms_total",
    ),
    "early": NoteSpec(series="unrequested_rooms_total"),
    "expired": NoteSpec(
        "a slot was not acknowledged", NETWORK, "expired_slots_total",
        code="MIXKV-MSG-02", consequence="it was set aside",
    ),
    "unknown_ack": NoteSpec(series=_DROPPED),
    # on both
    "weights_different": NoteSpec(
        "its weights have another version", "Update both sides under one weight_version",
        "weights_total", ("different",), consequence="fewer drafts may be accepted",
    ),
    "weights_same": NoteSpec(series="weights_total", values=("same",)),
    "weights_unknown": NoteSpec(series="weights_total", values=("unknown",)),
    "unreadable": NoteSpec(
        "a message could not be read", "Install the same release on both sides", _DROPPED,
        code="MIXKV-MSG-01", consequence="it was dropped",
    ),
}  # fmt: skip


class Series(NamedTuple):
    """One metric. `name` follows PREFIX; one ending in _total is a counter, in _seconds a
    histogram, any other a gauge. `initial_labels`: label values that are exported as 0 from the
    rank's start; others appear once counted."""

    name: str
    sides: Values
    help: str
    labels: Values = ()
    initial_labels: tuple[Values, ...] = ((),)


_BOTH = (PREFILL, DECODE)
_DRAFT = ("prefill", "state", "reason")
"""Labels for how a request's drafter started."""

SERIES = (
    Series(
        "rooms_total", (DECODE,),
        "Requests on this rank, by how their drafter started; `closed`: they ended before that.",
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
    Series("slots", _BOTH, "Slots of the staging buffer.", ("release",), ((__version__,),)),
    Series("slots_used", _BOTH, "Slots in use."),
    Series("weights_total", _BOTH, "Requests with a peer, by how both sides' weights compare.",
           ("state",), (("same",), ("different",), ("unknown",))),
    Series("messages_dropped_total", _BOTH, "Messages that were unreadable, duplicate or late."),
)  # fmt: skip
