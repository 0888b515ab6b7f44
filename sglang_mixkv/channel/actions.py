"""Actions that the state machines of both sides request; each side adds its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_mixkv.channel.messages import Message


class Send(msgspec.Struct, frozen=True):
    """Send a message. `peer`: a prefill rank, or a reader's connection. `chunks`: on prefill, the
    chunks whose last segment this READY announces."""

    peer: bytes
    message: Message
    chunks: Sequence[Any] = ()


class StartCopies(msgspec.Struct, frozen=True):
    """Make these copies through their requests' gates, in any order or batches. `Machine.copied`
    follows, for one or several at a time."""

    jobs: tuple[Any, ...]


class Note(msgspec.Struct, frozen=True):
    """An event to count under `what`, and to log once per `peer`: a prefill rank as decode names
    it, or a reader's instance."""

    what: str
    peer: bytes = b""
    detail: str = ""
