"""What a prefill rank's decisions ask of SGLang's manager. engine/ implements it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from sglang_mixkv.protocol.frames import Address
from sglang_mixkv.protocol.messages import Abort
from sglang_mixkv.protocol.registration import Registration


class SGLang(Protocol):
    """SGLang's own tables and answers. Nothing here raises but `check_dcp`."""

    def statuses(self) -> Mapping[int, int]:
        """Status (messages.Poll) of every room that SGLang knows."""

    def rooms(self) -> Collection[int]:
        """Numbers of these rooms."""

    def fail(self, room: int, reason: str) -> None:
        """End a room with this reason on both sides; the first reason stays."""

    def takes_back(self, session: str) -> bool:
        """Whether a peer that a write failed to is there all the same, and is to be served."""

    def note_unsettled(self, room: int) -> None:
        """A write of this room may still go on: its abort is never acknowledged as drained."""

    def mark_failed(self, room: int) -> None:
        """End a room on this side."""

    def keep_reason(self, room: int, reason: str) -> None:
        """For the room's failure, if none is known yet."""

    def forget(self, room: int) -> None:
        """Drop a room that no sender will end from every table."""

    def refuse(self, who: Address, room: int, reason: str) -> None:
        """Tell a decode rank, once, that its room failed. It need not be a peer."""

    def acknowledge(self, abort: Abort) -> None:
        """Answer an abort: nothing of it is in flight."""

    def check_dcp(self, registration: Registration) -> None:
        """Raise MixKVError for decode context parallelism that cannot be served."""
