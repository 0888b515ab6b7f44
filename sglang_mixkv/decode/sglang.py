"""What a decode rank's decisions ask of SGLang's manager. engine/ implements it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol


class SGLang(Protocol):
    """SGLang's own tables. Nothing here raises."""

    def statuses(self) -> Mapping[int, int]:
        """Status (messages.Poll) of every room that SGLang knows."""

    def acknowledged(self, room: int) -> Collection[int]:
        """Prefill ranks, by SGLang's unique number, that have nothing of this aborted room in
        flight any more."""

    def awaits_acks(self, room: int) -> bool:
        """Whether prefill ranks have not all said yet that nothing of this number's last
        request, which failed, is in flight."""
