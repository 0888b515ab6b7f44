"""How one backend of one SGLang release frames its control messages.

to a prefill rank    registration, metadata    the guard first, where the backend has one
                     ABORT                     the same on every backend
to a decode rank     status                    the status tag first, where the backend has one
                     ABORT_ACK                 the same on every backend
                     AUX_DATA                  only where the backend sends it
"""

from __future__ import annotations

import msgspec

from sglang_mixkv.protocol.frames import Frames, unreadable
from sglang_mixkv.protocol.messages import MetadataPositions
from sglang_mixkv.protocol.registration import Positions


class Framing(msgspec.Struct, frozen=True):
    """`registration`, `metadata`: where they have what, behind the guard. The defaults are
    Mooncake's."""

    registration: Positions = Positions()
    metadata: MetadataPositions = MetadataPositions()
    guard: bytes = b""
    status_tag: bytes = b""
    has_aux_messages: bool = True

    def unguarded(self, message: Frames) -> Frames:
        """A registration or metadata without its guard. Raises MixKVError."""
        return _without(self.guard, message, "a registration or metadata")

    def untagged(self, message: Frames) -> Frames:
        """A status message without its tag. Raises MixKVError."""
        return _without(self.status_tag, message, "a status message")


def _without(first: bytes, message: Frames, what: str) -> Frames:
    if not first:
        return message
    if message[0] != first or len(message) < 2:
        raise unreadable(
            f"{message[0][:20]!r} where {what} starts with {first!r}: a stranger's message, or "
            "one of another transfer backend."
        )
    return message[1:]
