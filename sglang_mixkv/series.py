"""What the plugin counts, and the Prometheus series that it becomes.

A count is a name and an amount (`Stats.add`). This table says which series shows it; a
count that is not in the table stays in the JSON file. Labels have few, fixed values: every
series of a rank exists from its start, at 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang_mixkv.errors import REASONS

PREFILL, DECODE = "prefill", "decode"
BOTH = (PREFILL, DECODE)


@dataclass(frozen=True)
class Family:
    """One metric: a counter or a gauge. `counts`: value of `label` -> the count that it shows;
    without a label the one value is ""."""

    name: str
    kind: str
    help: str
    counts: Mapping[str, str]
    label: str = ""
    sides: tuple[str, ...] = BOTH


FAMILIES = (
    Family(
        "sglang:mixkv_sent_bytes_total",
        "counter",
        "KV bytes that a prefill rank handed to the transport and that it took.",
        {"target": "target_bytes_sent", "draft": "draft_bytes_sent"},
        "component",
        (PREFILL,),
    ),
    Family(
        "sglang:mixkv_needed_bytes_total",
        "counter",
        "KV bytes that completed requests needed; over all ranks as many as were sent, but for "
        "failures and, with DCP, ends of last pages.",
        {"target": "target_bytes_needed", "draft": "draft_bytes_needed"},
        "component",
        (DECODE,),
    ),
    Family(
        "sglang:mixkv_send_seconds_total",
        "counter",
        "Seconds that transfer threads spent on those bytes, packing included, divided by bytes.",
        {"target": "target_send_seconds", "draft": "draft_send_seconds"},
        "component",
        (PREFILL,),
    ),
    Family(
        "sglang:mixkv_copy_seconds_total",
        "counter",
        "Seconds spent copying within this rank: packing on prefill (part of the send seconds), "
        "scattering on decode.",
        {"": "copy_seconds"},
    ),
    Family(
        "sglang:mixkv_path_bytes_total",
        "counter",
        "The sent bytes again, by path: packed first, or written from the pool.",
        {"packed": "packed_bytes", "direct": "direct_bytes"},
        "path",
        (PREFILL,),
    ),
    Family(
        "sglang:mixkv_descriptors_total",
        "counter",
        "Byte ranges handed to the transport.",
        {"": "descriptors"},
        sides=(PREFILL,),
    ),
    Family(
        "sglang:mixkv_staging_used_bytes",
        "gauge",
        "Bytes of the staging buffer that are held, or in quarantine after an aborted request.",
        {"": "staging_used"},
        sides=(DECODE,),
    ),
    Family(
        "sglang:mixkv_staging_size_bytes",
        "gauge",
        "Bytes of the staging buffer; 0 until a peer needs it.",
        {"": "staging_size"},
        sides=(DECODE,),
    ),
    Family(
        "sglang:mixkv_staging_full_total",
        "counter",
        "Requests that found no room in the staging buffer: their slices go without it, slower.",
        {"": "staging_full"},
        sides=(DECODE,),
    ),
    Family(
        "sglang:mixkv_peers_refused_total",
        "counter",
        "Refusals in the handshake: on decode each request, on prefill each registration.",
        {reason: f"refused_{reason}" for reason in REASONS},
        "reason",
    ),
    Family(
        "sglang:mixkv_cold_requests_total",
        "counter",
        "Requests served without the prompt's draft KV.",
        {"": "cold_requests"},
        sides=(DECODE,),
    ),
    Family(
        "sglang:mixkv_messages_dropped_total",
        "counter",
        "Control messages that were dropped: unreadable, from a stranger, or too late.",
        {"": "messages_dropped"},
    ),
)


def of_side(side: str) -> Iterator[Family]:
    """The families of a prefill or a decode rank; none for another side."""
    return (family for family in FAMILIES if side in family.sides)


def divided(seconds: float, target_bytes: int, draft_bytes: int) -> tuple[float, float]:
    """Seconds of one chunk for target and draft, in proportion to their bytes."""
    total = target_bytes + draft_bytes
    draft = seconds * draft_bytes / total if total else 0.0
    return seconds - draft, draft
