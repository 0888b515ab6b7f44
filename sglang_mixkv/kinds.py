"""What each note of the two state machines is counted as, and what the log says of its first.

`happened` and `remedy` make a sentence with the peer in front; kinds without are counted alone.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_mixkv import series
from sglang_mixkv.series import Family, Values

CONSEQUENCE = "the drafter starts cold: output right, fewer drafts accepted"
NETWORK = "Look at the network between the two, and at their load"
REPORT = "Report it with both logs"
MEMORY = "Raise --mixkv-staging-mb"


class Kind(NamedTuple):
    """`family`: None where the room is counted when SGLang ends it, or is not a series."""

    family: Family | None = None
    values: Values = ()
    happened: str = ""
    remedy: str = ""
    code: str = "MIXKV-PAIR-06"
    consequence: str = CONSEQUENCE


def _cold(happened: str = "", remedy: str = "") -> Kind:
    return Kind(None, (), happened, remedy)


def _fail(code: str, happened: str = "", remedy: str = "") -> Kind:
    return Kind(series.FAILS_SENT, (code,), happened, remedy)


UNREADABLE = Kind(
    series.DROPPED, (), "a message that cannot be read", "Install the same release on both sides",
    "MIXKV-MSG-01", "it is dropped",
)  # fmt: skip

DECODE = {
    "warm": Kind(), "cold": Kind(), "failed": Kind(), "closed": Kind(),
    "cold_no_drafter": Kind(), "cold_mismatch": Kind(),  # logged with the facts that differ
    "cold_breaker": Kind(), "cold_prefill_aborted": Kind(),
    "cold_deadline": _cold("draft KV did not come in time", NETWORK),
    "cold_lost": _cold(
        "the channel's connection is lost", "Is it up? Its port (SGLANG_MIXKV_PORT) must be open"
    ),
    "cold_read": _cold("its staging buffer could not be read", NETWORK),
    "cold_slots": _cold("no slot of this rank was free", MEMORY),
    "cold_stalled": _cold("this process stood still", "Look at the load of this host"),
    "cold_stale": _cold("the slot no longer held what was announced", REPORT),
    "cold_unpack": _cold("draft KV could not be unpacked", "See the traceback above"),
    "cold_protocol": _cold("an announcement that does not fit", REPORT),
    "cold_prefill_pack": _cold("prefill could not pack", "See prefill's log"),
    "cold_prefill_slow": _cold("prefill gave up packing", "Look at prefill's load, and its log"),
    "cold_prefill_heads": _cold("prefill does not serve these heads", MEMORY + " on prefill"),
    "cold_prefill_full": _cold("too many rooms without a request", "See prefill's log"),
    "cold_prefill_restarted": _cold("it was started anew", "Nothing: it is resolved again"),
    "cold_prefill_other": _cold("prefill refused for a reason of a later release", REPORT),
    "breaker_opened": Kind(
        series.BREAKER_OPENED, (), "three requests in a row without draft KV", NETWORK,
        consequence="its requests start cold at once, but for a probe after 1, 2, ... 30 s",
    ),
    "not_cleared": Kind(
        None, (), "draft rows could not be cleared", "See the traceback above",
        "MIXKV-SELF-01", "the request fails",
    ),
    "doubled": Kind(series.DROPPED),
    "unreadable": UNREADABLE,
}  # fmt: skip

PREFILL = {
    "unopened": Kind(
        series.UNOPENED, (), "a decode rank did not open the request",
        "Start decode with --enable-mixkv; if it is, the channel's port must be open",
    ),
    "early": Kind(series.UNREQUESTED),
    "expired": Kind(
        series.EXPIRED_SLOTS, (), "a slot that nobody acknowledged", NETWORK, "MIXKV-MSG-02",
        "it was set aside for 60 s",
    ),
    "unknown_ack": Kind(series.DROPPED),
    "unreadable": UNREADABLE,
    "aborted": _fail("aborted"),
    "pack": _fail("pack", "draft KV could not be packed", "See the traceback above"),
    "slow": _fail("slow", "packing made no progress for 1 s", MEMORY + ", or lower the load"),
    "heads": _fail("heads", "heads that cannot be served", MEMORY),
    "full": _fail("full", "a decode rank has too many rooms without a request", REPORT),
    "restarted": _fail("restarted"),
}  # fmt: skip

SUSPECT = {
    against: Kind(
        None, (), f"warm requests accept {what}",
        "Take it out of the router, and run `python -m sglang_mixkv accept` against it alone. If "
        "that is low, restart it and report this",
        "MIXKV-PAIR-08", "output right, but its draft KV may be wrong, or its prompts harder",
    )
    for against, what in (
        ("past", "a fifth less than they did"), ("cold", "no more than its cold ones")
    )
}  # fmt: skip
"""By what a prefill server's requests were compared with (decode/health.py)."""

OF_SIDE = {series.PREFILL: PREFILL, series.DECODE: DECODE}
