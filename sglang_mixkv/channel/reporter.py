"""What a channel reports, by an object that counts and logs it."""

from __future__ import annotations

from typing import Any, Protocol


class Reporter(Protocol):
    """Called from several threads. Nothing here raises."""

    def __call__(self, note: Any) -> None:
        """A Note of one of the state machines."""

    def moved(self, size: int, seconds: float) -> None:
        """So many bytes of draft KV were packed, or put in place."""

    def ended(self, handle: Any, reason: str) -> None:
        """SGLang is done with a request on decode, and goes on with it, or has failed it. Called in
        the scheduler's thread."""

    def ticked(self) -> None:
        """Ten times a second, by the channel thread."""

    def publish(self) -> None:
        """A request has come to its end here."""
