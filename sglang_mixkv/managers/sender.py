"""The prefill side of one request."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

from sglang_mixkv.managers.aside import is_ours, override


class MixKVSender(MooncakeKVSender):
    """SGLang's sender; when it is cleared, nothing of its room is left behind."""

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if is_ours(mgr):
            self.sent = mgr.open_room(bootstrap_room)

    @override(MooncakeKVSender)
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """As stock; fewer pages than none, and no chunk would ever be sent."""
        super().init(num_kv_indices, aux_index)
        if num_kv_indices < 0:
            reason = "the decode side's cached prefix is longer than the prompt."
            self.kv_mgr.fail_room(self.bootstrap_room, reason)

    @override(MooncakeKVSender)
    def clear(self) -> None:
        """Ours first: once stock has said that the room ended, its number may be used again."""
        self.kv_mgr.forget_room(self.bootstrap_room)
        super().clear()
        if self.conclude_state == KVPoll.Success:  # an ABORT that came too late left a reason
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    @override(MooncakeKVSender)
    def abort(self) -> None:
        """As stock; the decode side is told, which in stock learns it by its timeout."""
        self.kv_mgr.abandon_room(self.bootstrap_room)
        super().abort()
        if self.bootstrap_room not in self.kv_mgr.request_status:  # it had ended before
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    @override(MooncakeKVSender)
    def get_transfer_metric(self) -> Any:
        """As stock, with the bytes that were sent in place of stock's product (see sent.py)."""
        metric = super().get_transfer_metric()
        manager = self.kv_mgr
        if manager.has_plans:
            state = self._transfer_num_state_indices * manager.state_item_lens_sum
            total = self.sent.total(state, sharded=manager.sharded_state)
            metric.transfer_total_bytes = total
        return metric
