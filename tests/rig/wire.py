"""Control messages of both transfer backends, frame by frame, by the names that protocol/ gives the
frames. A test says what it changes; where that is depends on the backend."""

from __future__ import annotations

from typing import Any

from rig import model

from sglang_mixkv.engine.releases import RELEASES
from sglang_mixkv.protocol.framing import Framing

FRAMINGS = RELEASES[-1].framings


def framing_of(message: list[bytes]) -> Framing:
    nixl = FRAMINGS["nixl"]
    return nixl if message and message[0] == nixl.guard else FRAMINGS["mooncake"]


def unguarded(message: list[bytes]) -> list[bytes]:
    return message[bool(framing_of(message).guard) :]


def positions(message: list[bytes]) -> Any:
    framing = framing_of(message)
    is_registration = unguarded(message)[:1] == [b"None"]
    return framing.registration if is_registration else framing.metadata


def place(message: list[bytes], name: str) -> int:
    """Number of the frame with that name in a whole registration or metadata message."""
    return bool(framing_of(message).guard) + getattr(positions(message), name)


def named(message: list[bytes], name: str) -> bytes:
    return message[place(message, name)]


def replaced(message: list[bytes], name: str, frame: bytes) -> list[bytes]:
    at = place(message, name)
    return [*message[:at], frame, *message[at + 1 :]]


def stock(message: list[bytes]) -> list[bytes]:
    """SGLang's own frames, without an extension."""
    return message[: bool(framing_of(message).guard) + positions(message).count]


def metadata(**frames: bytes) -> list[bytes]:
    """A message of the backend that the test runs over; frames without a value are empty."""
    framing = FRAMINGS[model.BACKEND]
    message = [b""] * framing.metadata.count
    for name, frame in frames.items():
        where = getattr(framing.metadata, name)
        if where is not None:
            message[where] = frame
    return [framing.guard, *message] if framing.guard else message


def status(*frames: bytes) -> list[bytes]:
    """A status message of that backend."""
    tag = FRAMINGS[model.BACKEND].status_tag
    return [tag, *frames] if tag else [*frames]
