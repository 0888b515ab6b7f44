"""The decode side of one request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver

from sglang_mixkv.engine.aside import override
from sglang_mixkv.kv.routes import Route, route_of
from sglang_mixkv.protocol.extension import Grant, encode

logger = logging.getLogger(__name__)


class MixKVReceiver(MooncakeKVReceiver):
    """SGLang's receiver, refusing servers that do not fit and naming each rank's route."""

    conclude_state: Any
    pages = 0
    cleared = False
    grants: Mapping[tuple[int, int], Grant] = MappingProxyType({})

    @override(MooncakeKVReceiver)
    def init(self, prefill_dp_rank: int) -> None:
        """Refuse where stock refuses, in init: the request fails, the server goes on."""
        room = self.bootstrap_room
        reason = self.kv_mgr.refusal_of(self.bootstrap_addr) or self.kv_mgr.why_in_use(room)
        if reason is None or self.conclude_state == KVPoll.Failed:
            super().init(prefill_dp_rank)
            if self.conclude_state is None and self.kv_mgr.caches.draft is not None:
                expected = self.kv_mgr.expect(self.prefill_info)
                self.kv_mgr.expected[self.bootstrap_room] = expected
            return
        self._fail(reason, prefill_dp_rank)

    def _fail(self, reason: str, prefill_dp_rank: int) -> None:
        """Conclude this request on both sides."""
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.tell_prefill(self.bootstrap_addr, self.bootstrap_room, prefill_dp_rank)

    @override(MooncakeKVReceiver)
    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        info = super()._get_bootstrap_info_from_server(
            prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank
        )
        if info is not None:
            info["tp_rank"] = int(target_tp_rank)
        return info

    @override(MooncakeKVReceiver)
    def _register_kv_args(self) -> bool:
        """With a drafter, who is a dummy is our table's decision instead of stock's."""
        if self.kv_mgr.caches.draft is not None:
            self.kv_mgr.prepare_staging(self.prefill_info)
            for info in self.bootstrap_infos or []:
                info["is_dummy"] = self._route(info).is_dummy
        return super()._register_kv_args()

    def _route(self, bootstrap_info: dict[str, Any]) -> Route:
        table = self.kv_mgr.routes_from(self.prefill_info)
        rank, stage = bootstrap_info["tp_rank"], bootstrap_info["pp_rank"]
        route = route_of(table, rank, stage)
        assert route is not None
        return route

    @override(MooncakeKVReceiver)
    def _send_bootstrap_message(
        self, *, bootstrap_info: dict[str, Any], message: list[bytes], operation: Any
    ) -> bool:
        if operation == "_register_kv_args":
            route = self._route(bootstrap_info)
            message = [*message, self.kv_mgr.extension_for(self.prefill_info, route)]
        else:
            key = bootstrap_info.get("tp_rank", -1), bootstrap_info.get("pp_rank", -1)
            if key in self.grants:
                message = [*message, encode(self.grants[key])]
        return super()._send_bootstrap_message(
            bootstrap_info=bootstrap_info, message=message, operation=operation
        )

    @override(MooncakeKVReceiver)
    def send_metadata(
        self, kv_indices: Any, aux_index: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """As stock, and senders of head slices are told how they are wanted."""
        self.pages = len(kv_indices)
        expected = self.kv_mgr.expected.get(self.bootstrap_room)
        if expected is not None:
            expected.aux_row = aux_index
        if self.bootstrap_infos is not None and self.conclude_state is None:
            try:
                self._prepare(kv_indices, aux_index)
            except Exception as error:
                logger.exception("sglang-mixkv could not prepare room %s", self.bootstrap_room)
                reason = f"sglang-mixkv could not prepare the request: {error!r}"
                self._fail(reason, self.prefill_dp_rank)
                return
        super().send_metadata(kv_indices, aux_index, *args, **kwargs)

    def _prepare(self, pages: Any, aux_row: int | None) -> None:
        manager, room, info = self.kv_mgr, self.bootstrap_room, self.prefill_info
        manager.prepare(room, info, pages, aux_row)
        self.grants = manager.grant(room, info, pages)

    @override(MooncakeKVReceiver)
    def abort(self) -> None:
        """No scatter starts, and none is under way, once this has returned."""
        if self._owns_bootstrap_room:
            self.kv_mgr.release_room(self.bootstrap_room)
        super().abort()

    @override(MooncakeKVReceiver)
    def clear(self) -> None:
        """Once: SGLang clears a failed request again when its pages are released, and another
        request may have the room's number by then."""
        if self.cleared:
            return
        self.cleared = True
        if self._owns_bootstrap_room:
            self.kv_mgr.release_room(self.bootstrap_room)
            self.kv_mgr.expected.pop(self.bootstrap_room, None)
        super().clear()

    @override(MooncakeKVReceiver)
    def poll(self) -> Any:
        concluded = self.conclude_state
        status = super().poll()
        if concluded is None and status == KVPoll.Success:
            self.kv_mgr.count_received(self.pages, self.prefill_info)
        elif concluded is None and status == KVPoll.Failed:
            self.invalidate_cached_bootstrap_infos()  # the next request registers again
        return status
