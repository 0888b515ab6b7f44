"""Actions that the state machines of both sides ask for; each has some of its own besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_mixkv.channel.messages import Message


class Send(msgspec.Struct, frozen=True):
    """`peer`: a prefill rank, or the connection of a reader. `chunks`: of prefill, those whose last
    segment a READY announces."""

    peer: bytes
    message: Message
    chunks: Sequence[Any] = ()


class StartCopies(msgspec.Struct, frozen=True):
    """Make copies between slots here and rows of requests, through the requests' gates: in any
    order, and together. `Machine.copied` follows for each, or for several."""

    jobs: tuple[Any, ...]


class Note(msgspec.Struct, frozen=True):
    """Something to count, by `what`, and to log once for each peer: a prefill rank as decode names
    it, or the instance of a reader."""

    what: str
    peer: bytes = b""
    detail: str = ""
