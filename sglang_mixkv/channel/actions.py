"""Actions that the state machines of both sides request; each side adds its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_mixkv.channel.messages import Message
from sglang_mixkv.draft.layout import Pages


class Send(msgspec.Struct, frozen=True):
    """Send a message. `peer`: a prefill rank, or a reader's connection. `chunks`: on prefill, the
    pages of each chunk whose last segment this READY announces."""

    peer: bytes
    message: Message
    chunks: Sequence[Pages] = ()


class StartCopies(msgspec.Struct, frozen=True):
    """Make these copies through their requests' gates, in any order and grouping. The worker then
    calls `Machine.copied`, for one or several copies at a time."""

    jobs: tuple[Any, ...]


class Note(msgspec.Struct, frozen=True):
    """An event to count under `what`, and to log once per `peer`, which is the Peer of a prefill
    rank on decode, and a reader's instance on prefill."""

    what: str
    peer: bytes = b""
    detail: str = ""
