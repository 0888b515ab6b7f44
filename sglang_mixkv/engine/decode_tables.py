"""SGLang's tables of one decode rank, as decode/ asks for them (decode/sglang.py)."""

from __future__ import annotations

from typing import Any


class DecodeTables:
    """`manager`: SGLang's, of a decode rank."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def statuses(self) -> Any:
        return self._manager.request_status

    def acknowledged(self, room: int) -> frozenset[int]:
        state = self._manager._deferred_abort_ack_tracker.get(room)
        return frozenset(state.prefill_ranks) if state is not None else frozenset()

    def awaits_acks(self, room: int) -> bool:
        return room in self._manager._deferred_abort_ack_tracker
