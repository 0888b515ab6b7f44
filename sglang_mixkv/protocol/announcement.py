"""What a prefill rank announces of itself, and how the decode side reads it.

A rank adds it to its row at the bootstrap server; decode asks for it before it registers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol.extension import PROTOCOL
from sglang_mixkv.protocol.facts import Facts
from sglang_mixkv.protocol.frames import unreadable

MAX_ANNOUNCEMENT = 64 << 10


class Announcement(msgspec.Struct, frozen=True):
    """The protocol first, facts only if that fits."""

    protocol: int
    facts: Facts


class _Protocol(msgspec.Struct, frozen=True):
    protocol: int = 0


def announcement(facts: Facts) -> dict[str, Any]:
    """The value that goes into a prefill rank's row."""
    return dict(msgspec.to_builtins(Announcement(PROTOCOL, facts)))


def read_announcement(body: bytes, source: str) -> Facts:
    """The facts in an announcement; the protocol is compared before they are read.

    `source`: whose it is, for the reason. Raises MixKVError, never anything else.
    """
    if len(body) > MAX_ANNOUNCEMENT:
        raise unreadable(f"{source} announced more than {MAX_ANNOUNCEMENT} bytes.")
    try:
        protocol = msgspec.json.decode(body, type=_Protocol).protocol
        if protocol != PROTOCOL:
            raise MixKVError(
                "MIXKV-PAIR-02",
                f"{source} speaks sglang-mixkv protocol {protocol}, this side {PROTOCOL}. Install "
                "the same sglang-mixkv on both sides.",
            )
        return msgspec.json.decode(body, type=Announcement).facts
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(f"{source} announced malformed facts: {error}.") from None


def kept(said: Any) -> bytes | None:
    """What a bootstrap server keeps of a row's announcement; None for what it cannot pass on."""
    try:
        body = msgspec.json.encode(said)
    except (TypeError, ValueError, RecursionError):
        return None
    return body if isinstance(said, dict) and len(body) <= MAX_ANNOUNCEMENT else None
