"""The interface through which a channel reports; engine/metrics.py counts and logs it."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_mixkv.channel.actions import Note


class Reporter(Protocol):
    """Several threads call it. None of its methods raises."""

    def __call__(self, note: Note) -> None: ...

    def moved(self, size: int, seconds: float) -> None:
        """`size` bytes of draft KV were packed, or put in place."""

    def announced(self, seconds: float) -> None:
        """A chunk's last READY was sent to a reader, so many seconds after it was written."""

    def ended(self, handle: Any, reason: str) -> None:
        """SGLang goes on with a request on decode, or has failed it for `reason`. The scheduler's
        thread calls this."""

    def ticked(self) -> None:
        """The channel's thread calls this ten times a second."""
