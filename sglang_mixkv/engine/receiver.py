"""The decode side of one request.

init           refuse, or SGLang's own: addresses, registration with each prefill rank
               -> DecodeRank.begin -> Room
send_metadata  DecodeRank.prepare -> grants, one per prefill rank
poll           SGLang's own
abort, clear   DecodeRank.release, end; clear counts what came
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from sglang_mixkv.decode.rank import DecodeRank
from sglang_mixkv.decode.rooms import Room
from sglang_mixkv.decode.slices import Sender
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol.extension import Grant, encode

logger = logging.getLogger(__name__)


def _endpoint(info: dict[str, Any]) -> tuple[str, int]:
    """Where the prefill rank of stock's record listens."""
    return info["rank_ip"], info["rank_port"]


class RoomReceiver(CommonKVReceiver):
    """SGLang's receiver, which refuses servers that do not fit and names each rank's route.

    `side`, `room`: None for a receiver of a manager that has no side, `room` also before init.
    """

    side: DecodeRank | None = None
    room: Room | None = None
    conclude_state: Any
    bootstrap_infos: Any
    cleared = checked = False
    grants: Mapping[Sender, Grant] = MappingProxyType({})

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        side = getattr(mgr, "decode", None)
        self.side = side if isinstance(side, DecodeRank) else None

    def init(self, prefill_dp_rank: int) -> None:
        """Refuse where stock refuses, in init: the request fails, the server goes on."""
        side, address = self.side, self.bootstrap_addr
        if side is None or self.conclude_state == KVPoll.Failed:
            super().init(prefill_dp_rank)
            return
        reason = side.refusal(address, self.bootstrap_room)
        if reason is not None:
            self._fail(reason)
            self._dismiss(prefill_dp_rank)
            return
        try:
            super().init(prefill_dp_rank)
            if self.conclude_state is None:
                self._register_again(side)
                self.room = side.begin(self.bootstrap_room, address)
        except MixKVError as error:
            self._fail(f"sglang-mixkv refuses prefill server {address}: {error}")
            self._dismiss(prefill_dp_rank)
        except Exception as error:
            logger.exception("[MIXKV-SELF-01] sglang-mixkv could not begin a request")
            self._fail(f"[MIXKV-SELF-01] sglang-mixkv could not begin the request: {error!r}")
            self._dismiss(prefill_dp_rank)

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed

    def _dismiss(self, dp_rank: int) -> None:
        """The prefill side's half ends too."""
        self.kv_mgr.dismiss(self.bootstrap_addr, self.bootstrap_room, dp_rank)

    # -- addresses and registration

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        info = super()._get_bootstrap_info_from_server(
            prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank
        )
        if info is not None and self.side is not None and not self.checked:
            self.checked = True
            self.kv_mgr.check_is_the_same(self.bootstrap_addr)
        if info is not None:
            info["tp_rank"] = int(target_tp_rank)
        return info

    def _register_kv_args(self) -> bool:
        """With a drafter, who is a dummy is our table's decision instead of stock's."""
        side = self.side
        source = side.sources.get(self.bootstrap_addr) if side is not None else None
        if side is not None and source is not None and side.local.has_draft:
            side.landing.prepare(source.target, source.draft)
            for info in self.bootstrap_infos or []:
                info["is_dummy"] = source.route(info["tp_rank"], info["pp_rank"]).is_dummy
        sent = bool(super()._register_kv_args())
        if side is not None and sent:
            for info in self.bootstrap_infos:
                side.registrations.told(self.bootstrap_addr, _endpoint(info), side.landing.span)
        return sent

    def _register_again(self, side: DecodeRank) -> None:
        """Register with those ranks of a known server that need it. No HTTP: stock's record of
        them stays."""
        known, address = self.bootstrap_infos, self.bootstrap_addr
        span = side.landing_span(address)
        lacks = side.registrations.lacks
        stale = [info for info in known if lacks(address, _endpoint(info), span)]
        if not stale:
            return
        self.bootstrap_infos = stale
        try:
            sent = self._register_kv_args()
        finally:
            self.bootstrap_infos = known
        if not sent:
            self.invalidate_cached_bootstrap_infos()

    def _send_bootstrap_message(
        self, *, bootstrap_info: dict[str, Any], message: list[bytes], operation: Any
    ) -> bool:
        more = self._extension(bootstrap_info, operation) if self.side is not None else None
        return super()._send_bootstrap_message(
            bootstrap_info=bootstrap_info,
            message=message if more is None else [*message, more],
            operation=operation,
        )

    def _extension(self, info: dict[str, Any], operation: str) -> bytes | None:
        """The frame behind SGLang's own, if this message has one."""
        assert self.side is not None
        who = info.get("tp_rank", -1), info.get("pp_rank", -1)
        if operation != "_register_kv_args":
            return encode(self.grants[who]) if who in self.grants else None
        source = self.side.sources.get(self.bootstrap_addr)
        return None if source is None else encode(self.side.extension(source, *who))

    # -- the request

    def send_metadata(
        self, kv_indices: Any, aux_index: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """As stock, and senders of head slices are told how they are wanted."""
        side, room = self.side, self.room
        if side is not None and room is not None and self.conclude_state is None:
            try:
                self.grants = side.prepare(room, kv_indices, aux_index)
            except Exception as error:
                logger.exception(
                    "[MIXKV-LAND-01] sglang-mixkv could not prepare room %s", self.bootstrap_room
                )
                self._fail(f"[MIXKV-LAND-01] sglang-mixkv could not prepare the request: {error!r}")
                self._dismiss(self.prefill_dp_rank)
                return
        super().send_metadata(kv_indices, aux_index, *args, **kwargs)

    def abort(self) -> None:
        """No scatter starts, and none is under way, once this has returned."""
        if self.room is not None:
            assert self.side is not None
            self.side.release(self.room)
        super().abort()

    def clear(self) -> None:
        """Once: SGLang clears a failed request again when its pages are released, and another
        request may have the room's number by then."""
        if self.side is None:
            super().clear()
            return
        if self.cleared:
            return
        self.cleared = True
        if self.room is not None:
            self._conclude(self.side, self.room)
            self.side.end(self.room)
        super().clear()

    def _conclude(self, side: DecodeRank, room: Room) -> None:
        """What this request's end means for the counters, and for the next request."""
        if self.conclude_state == KVPoll.Success:
            side.received(room)
            return
        # Without a reason another rank of this server has failed it.
        reason = self.kv_mgr.failure_records.get(room.number, "")
        side.registrations.failed(self.bootstrap_addr, reason)
