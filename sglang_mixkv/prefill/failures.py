"""Sends that failed: whether one request pays for it or the peer, and the reasons."""

from __future__ import annotations

import logging

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.prefill.rooms import Room
from sglang_mixkv.prefill.sglang import SGLang
from sglang_mixkv.transport.base import Transport

logger = logging.getLogger(__name__)

# Each failed write holds up a transfer thread, and with it the requests of others. A peer that
# answers is taken for dead all the same once failed writes in a row have cost so many seconds: as
# many as SGLang stays away from a dead peer before it probes it.
MOST_LOST_S = 30.0


class Failures:
    """Adds up, per session, the seconds of writes that failed since the last one that did not."""

    def __init__(self, sglang: SGLang) -> None:
        self._sglang = sglang
        self._lost_s: dict[str, float] = {}

    def is_peers(self, session: str, code: int, seconds: float) -> bool:
        """Whether a write of so many seconds shows that its peer is lost. One that answers a
        probe is not: by that SGLang takes a dead peer back, too, but half a minute later."""
        if not code:
            self._lost_s.pop(session, None)
            return False
        answers = self._sglang.takes_back(session)
        lost = self._lost_s[session] = self._lost_s.get(session, 0.0) + seconds
        return lost >= MOST_LOST_S or not answers


def log(session: str, room: Room | None, error: Exception) -> None:
    ours = isinstance(error, MixKVError)
    logger.error("%s", raised(session, room, error), exc_info=not ours)


def raised(session: str, room: Room | None, error: Exception) -> str:
    """The reason of a room of which something could not be sent."""
    what = f"room {room.number} " if room is not None else ""
    ours = isinstance(error, MixKVError)
    said = str(error) if ours else f"[MIXKV-SEND-02] {error!r}"
    return f"sglang-mixkv could not send {what}to {session}: {said}"


def unsent(session: str, room: Room | None, code: int, transport: Transport) -> str:
    """The reason of a room that a write of failed."""
    what = f"kv chunk of {room.number}" if room is not None else "a kv chunk"
    return f"[MIXKV-SEND-03] Failed to send {what} to {session}: {transport.why(code)}"
