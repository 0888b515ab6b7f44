"""The plugin's Prometheus series, and what each note of a state machine is counted as.

This module imports neither SGLang nor prometheus_client: `python -m sglang_mixkv status` reads the
same tables beside a server.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_mixkv.errors import REASONS

PREFILL, DECODE = "prefill", "decode"
PREFIX = "sglang:mixkv_"
Values = tuple[str, ...]

OTHER = "other"
ABORTED = "Aborted by prefill."
"""Why a request fails on decode that SGLang's prefill has aborted."""
STATES = ("warm", "cold", "retracted")
"""How the drafter of a request that decode has finished began."""


# ---------------------------------------------------------------- notes


class Kind(NamedTuple):
    """What a note is counted as, and what the log says of a peer's first. `series`: "" where the
    room is counted when SGLang ends it. `happened` and `remedy` make a sentence with the peer in
    front; a kind without them is not logged. `logged`: False where the log says it already, with
    the facts that differ, the reasons before, or a traceback."""

    happened: str = ""
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
TRACEBACK = "See the traceback above"
_FAIL, _DROPPED = "fails_sent_total", "messages_dropped_total"

NOTES = {
    # on decode: why a room is cold
    "cold_deadline": Kind("draft KV did not come in time", NETWORK),
    "cold_lost": Kind(
        "the channel's connection is lost", "Is it up? Its port (SGLANG_MIXKV_PORT) must be open"
    ),
    "cold_read": Kind("its staging buffer could not be read", NETWORK),
    "cold_slots": Kind("no slot of this rank was free", MEMORY),
    "cold_stalled": Kind("this process stood still", "Look at the load of this host"),
    "cold_stale": Kind("the slot no longer held what was announced", REPORT),
    "cold_unpack": Kind("draft KV could not be unpacked", TRACEBACK),
    "cold_protocol": Kind("an announcement that does not fit", REPORT),
    "cold_prefill_pack": Kind("prefill could not pack", "See prefill's log"),
    "cold_prefill_slow": Kind("prefill gave up packing", "Look at prefill's load, and its log"),
    "cold_prefill_heads": Kind("prefill does not serve these heads", MEMORY + " on prefill"),
    "cold_prefill_full": Kind("too many rooms without a request", "See prefill's log"),
    "cold_prefill_restarted": Kind("it was started anew", "Nothing: it is resolved again"),
    "cold_prefill_other": Kind("prefill refused for a reason of a later release", REPORT),
    "cold_no_drafter": Kind("one side has none", SAME_DRAFTER, logged=False),
    "cold_mismatch": Kind("the two sides' differ", SAME_DRAFTER, logged=False),
    "cold_breaker": Kind(
        "three requests in a row had no draft KV", "The other reasons say why", logged=False
    ),
    "cold_prefill_aborted": Kind(
        "prefill aborted them", "Nothing: their clients went away", logged=False
    ),
    "cold_repeated": Kind(
        "their room number came again, and its last request was not warm", "Nothing", logged=False
    ),
    "cold_unsent": Kind("a message of the room could not be made", TRACEBACK, logged=False),
    "cold_broken": Kind(
        "the channel did not decide in time, or has ended", "See decode's log", logged=False
    ),
    # on decode: anything else
    "breaker_opened": Kind(
        "three requests in a row without draft KV", NETWORK, "breaker_opened_total",
        consequence="its requests start cold at once, but for a probe after 1, 2, ... 30 s",
    ),
    "not_cleared": Kind(
        "draft rows could not be cleared", TRACEBACK,
        code="MIXKV-SELF-01", consequence="the request fails",
    ),
    "doubled": Kind(series=_DROPPED),
    "reused": Kind(series="rooms_total", values=("failed", "reused")),
    # on prefill: codes of FAIL
    "aborted": Kind("", "", _FAIL, ("aborted",)),
    "pack": Kind("draft KV could not be packed", TRACEBACK, _FAIL, ("pack",)),
    "slow": Kind(
        "packing made no progress for 1 s", MEMORY + ", or lower the load", _FAIL, ("slow",)
    ),
    "heads": Kind("heads that cannot be served", MEMORY, _FAIL, ("heads",)),
    "full": Kind("a decode rank has too many rooms without a request", REPORT, _FAIL, ("full",)),
    "restarted": Kind("", "", _FAIL, ("restarted",)),
    # on prefill: anything else
    "unopened": Kind(
        "a decode rank did not open the request",
        "Start decode with --enable-mixkv; if it is, the channel's port must be open",
        "unopened_rooms_total",
    ),
    "early": Kind(series="unrequested_rooms_total"),
    "expired": Kind(
        "a slot that nobody acknowledged", NETWORK, "expired_slots_total",
        code="MIXKV-MSG-02", consequence="it was set aside for 60 s",
    ),
    "unknown_ack": Kind(series=_DROPPED),
    # on both
    "unreadable": Kind(
        "a message that cannot be read", "Install the same release on both sides", _DROPPED,
        code="MIXKV-MSG-01", consequence="it is dropped",
    ),
}  # fmt: skip
"""By the note's `what`."""

COLD = (*(what[5:] for what in NOTES if what.startswith("cold_")), OTHER)
"""Why a decode rank's room is cold: all reasons that its code has, and one for any other."""

FAILS = tuple(what for what, kind in NOTES.items() if kind.series == _FAIL)
"""Codes of the FAIL messages that a prefill rank sends."""


# ---------------------------------------------------------------- series


class Series(NamedTuple):
    """One metric, by its name behind PREFIX; those that end in _total are counters, in _seconds
    histograms, the others gauges. `known`: values of its labels that exist from the rank's start,
    at 0. The others appear when they are counted first."""

    name: str
    sides: Values
    help: str
    labels: Values = ()
    known: tuple[Values, ...] = ((),)


_BOTH = (PREFILL, DECODE)
_DRAFT = ("prefill", "state", "reason")
"""Labels of how a request's drafter began."""

SERIES = (
    Series(
        "rooms_total", (DECODE,),
        "Requests on this rank, by how their drafter began; `closed`: they ended first.",
        ("state", "reason"),
        (("warm", ""), *(("cold", reason) for reason in COLD), ("failed", ""),
         ("failed", "reused"), ("closed", ""), ("closed", "prefill_aborted")),
    ),
    Series("prefill_rooms_total", (DECODE,), "The same by prefill server.", _DRAFT, ()),
    Series(
        "wait_seconds", (DECODE,), "From the target's arrival to the verdict.", _DRAFT[1:],
        (("warm", ""),),
    ),
    Series("finished_requests_total", (DECODE,), "Decoded requests that have ended.", _DRAFT, ()),
    Series("verify_rounds_total", (DECODE,), "Their verify rounds.", _DRAFT, ()),
    Series("accepted_tokens_total", (DECODE,), "Accepted drafts, and one a round.", _DRAFT, ()),
    Series("breaker_open", (DECODE,), "1 while one to its ranks is open.", ("prefill",), ()),
    Series("breaker_opened_total", (DECODE,), "How often one opened.", ("prefill",), ()),
    Series(
        "peers_refused_total", (DECODE,),
        "Requests that failed since their prefill server is refused.", ("reason",),
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
    Series("expired_slots_total", (PREFILL,), "Slots set aside for 60 s, as no ACK came."),
    Series("copy_seconds_total", _BOTH, "Seconds spent packing or unpacking."),
    Series("gpu_kernels", _BOTH, "On a GPU: 1 where kernels copy, 0 where torch does.", (), ()),
    Series("slots", _BOTH, "Slots of the staging buffer."),
    Series("slots_used", _BOTH, "Those in use."),
    Series("messages_dropped_total", _BOTH, "Messages that were unreadable, doubled or too late."),
)  # fmt: skip
