"""What a channel's threads report, by an object that counts and logs it."""

from __future__ import annotations

from typing import Any, Protocol


class Notes(Protocol):
    """Called from several threads. Nothing here raises."""

    def __call__(self, note: Any) -> None:
        """A Note of one of the state machines."""

    def moved(self, size: int, seconds: float) -> None:
        """So many bytes of draft KV were packed, or put in place."""

    def ended(self, entry: Any, reason: str) -> None:
        """SGLang is done with a room of decode, and goes on with its request, or has failed it.
        By the scheduler's thread."""

    def ticked(self) -> None:
        """Ten times a second, by the channel thread."""

    def publish(self) -> None:
        """A request has come to its end here."""
