"""The decode side of one request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver

from sglang_mixkv.core.routes import Route
from sglang_mixkv.core.wire import Grant, encode
from sglang_mixkv.managers.aside import override

logger = logging.getLogger(__name__)

# What prefill ranks say of a request that failed for want of a good registration: they have
# none, or turned it down, or do not send any more to a session that a write to it failed for,
# which a registration of that session ends (MooncakeKVManager._publish_peer_registration).
CURED_BY_REGISTRATION = (
    "registers again with its next request",
    "it registered from",
    "refuses this decode rank",
    "could not read this decode rank's registration",
    "Failed to send",
    "Decode instance could be dead",
)
# Of stock's record of a prefill rank: it has to be registered with before the next request.
STALE = "mixkv_stale"
STAGING = "mixkv_staging"  # the buffer that it was told of


class MixKVReceiver(MooncakeKVReceiver):
    """SGLang's receiver, refusing servers that do not fit and naming each rank's route."""

    conclude_state: Any
    bootstrap_infos: Any
    source: Any  # Source, from init on
    pages = 0
    cleared = False
    grants: Mapping[tuple[int, int], Grant] = MappingProxyType({})

    @override(MooncakeKVReceiver)
    def init(self, prefill_dp_rank: int) -> None:
        """Refuse where stock refuses, in init: the request fails, the server goes on."""
        manager, room = self.kv_mgr, self.bootstrap_room
        if self.conclude_state != KVPoll.Failed:
            reason = manager.refusal_of(self.bootstrap_addr) or manager.why_in_use(room)
            if reason is not None:
                self._fail(reason, prefill_dp_rank)
                return
        self.source = manager.sources.get(self.bootstrap_addr)
        if self.source is None:  # then stock finds that it does not know the server either
            manager.prefill_info_table.pop(self.bootstrap_addr, None)
        super().init(prefill_dp_rank)
        if self.conclude_state is None:
            self._register_again()
            if manager.caches.draft is not None:
                manager.expected[room] = self.source.expected()

    def _register_again(self) -> None:
        """Register with those ranks of a known server that need it. No HTTP: stock's record of
        them stays."""
        known, span = self.bootstrap_infos, self.kv_mgr.staging_span
        stale = [i for i in known if i.pop(STALE, False) or i.get(STAGING, span) != span]
        if not stale:
            return
        self.bootstrap_infos = stale
        sent = self._register_kv_args()
        self.bootstrap_infos = known
        if not sent:
            self.invalidate_cached_bootstrap_infos()

    def _fail(self, reason: str, prefill_dp_rank: int) -> None:
        """Conclude this request on both sides."""
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.farewells.tell(self.bootstrap_addr, self.bootstrap_room, prefill_dp_rank)

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
            self.kv_mgr.prepare_staging(self.source)
            for info in self.bootstrap_infos or []:
                info["is_dummy"] = self._route(info).is_dummy
                info[STAGING] = self.kv_mgr.staging_span
        return super()._register_kv_args()

    def _route(self, bootstrap_info: dict[str, Any]) -> Route:
        return self.source.routes[bootstrap_info["tp_rank"], bootstrap_info["pp_rank"]]

    @override(MooncakeKVReceiver)
    def _send_bootstrap_message(
        self, *, bootstrap_info: dict[str, Any], message: list[bytes], operation: Any
    ) -> bool:
        if operation == "_register_kv_args":
            route = self._route(bootstrap_info)
            message = [*message, self.kv_mgr.extension_for(self.source, route)]
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
        manager, room, source = self.kv_mgr, self.bootstrap_room, self.source
        manager.prepare(room, source, pages, aux_row)
        self.grants = manager.grant(room, source, pages)

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
            self._conclude()
            self.kv_mgr.release_room(self.bootstrap_room)
            self.kv_mgr.expected.pop(self.bootstrap_room, None)
        super().clear()

    def _conclude(self) -> None:
        """What this request's end means for the counters, and for the next request."""
        if self.conclude_state == KVPoll.Success:
            self.kv_mgr.count_received(self.pages, self.source)
            return
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "")
        if any(words in reason for words in CURED_BY_REGISTRATION):
            for info in getattr(self, "bootstrap_infos", None) or []:
                info[STALE] = True
