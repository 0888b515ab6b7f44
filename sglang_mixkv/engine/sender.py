"""The prefill side of one request."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender

from sglang_mixkv.prefill.rank import PrefillRank
from sglang_mixkv.prefill.rooms import Room


class RoomSender(CommonKVSender):
    """SGLang's sender, which opens and closes its room on this prefill rank.

    `side`, `room`: None for a sender of a manager that has no side.
    """

    side: PrefillRank | None = None
    room: Room | None = None

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        side = getattr(mgr, "prefill", None)
        if isinstance(side, PrefillRank):
            self.side, self.room = side, side.open_room(bootstrap_room)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """As stock; fewer pages than none, and no chunk would ever be sent."""
        super().init(num_kv_indices, aux_index)
        if self.side is not None and num_kv_indices < 0:
            reason = "[MIXKV-SEND-01] the decode side's cached prefix is longer than the prompt."
            self.side.fail(self.room, reason)

    def clear(self) -> None:
        """The room first: once stock has said that it ended, its number may be used again."""
        if self.side is None or self.room is None:
            super().clear()
            return
        self.side.close_room(self.room)
        super().clear()
        if self.conclude_state == KVPoll.Success:  # an ABORT that came too late left a reason
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    def abort(self) -> None:
        """As stock; the decode side is told, which in stock learns it by its timeout."""
        if self.side is not None and self.room is not None:
            self.side.abandon_room(self.room)
        super().abort()
        ended = self.bootstrap_room not in self.kv_mgr.request_status
        if self.side is not None and ended:
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    def get_transfer_metric(self) -> Any:
        """As stock, with the bytes that were sent in place of stock's product (rooms.Sent)."""
        metric = super().get_transfer_metric()
        if self.side is not None and self.room is not None and self.side.peers.any_planned:
            state = self._transfer_num_state_indices * self.kv_mgr.state_item_lens_sum
            sharded = self.side.local.sharded_state
            metric.transfer_total_bytes = self.room.sent.total(state, sharded=sharded)
        return metric
