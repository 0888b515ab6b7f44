"""A mixin for SGLang's receiver that also opens the request on the draft channel."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.plan import Plan
from sglang_mixkv.decode.worker import DecodeWorker, ReceiveHandle
from sglang_mixkv.engine.gpu import forward_event
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.guards.room_reuse import RoomUse

if TYPE_CHECKING:
    from sglang_mixkv.engine.manager import DraftManager

logger = logging.getLogger(f"sglang.{__name__}")


class DraftReceiver(RoomUse):
    """Mixed into CommonKVReceiver (manager.mixed). `handle`: None before send_metadata, and for a
    request that is not opened.

    `poll` turns SGLang's Success into Transferring while draft KV is pending, and into Failed if
    rows could not be cleared. `init` fails requests to a refused server.
    """

    kv_mgr: DraftManager
    handle: ReceiveHandle | None = None
    channel: DecodeWorker  # set with `handle`
    plan: Plan | None = None
    bootstrap_addr: str
    bootstrap_infos: Any

    def init(self, prefill_dp_rank: int) -> None:
        servers = self.kv_mgr.servers
        if self.conclude_state is None and (reason := servers.refuse(self.bootstrap_addr, self)):
            self._fail(reason)
            return
        super().init(prefill_dp_rank)  # type: ignore[misc]
        if self.conclude_state is None and self.bootstrap_infos:
            try:
                self.plan = servers.plan(self.bootstrap_addr, self.bootstrap_infos, self)
            except MixKVError as error:
                self._fail(str(error))

    def send_metadata(self, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
        super().send_metadata(kv_indices, *args, **kwargs)  # type: ignore[misc]
        if self.plan is None or self.conclude_state is not None:
            return
        prefix = kwargs.get("decode_prefix_len", args[2] if len(args) > 2 else None) or 0
        try:
            self._open(self.plan, kv_indices, prefix)
        except Exception as error:  # fail: uncleared rows may hold another request's KV
            logger.exception("[MIXKV-SELF-01] a room could not be opened")
            self._fail(f"[MIXKV-SELF-01] its room could not be opened: {error!r}")

    def _open(self, plan: Plan, pages: Any, first: int) -> None:
        local, page_size, end = self.kv_mgr.local, self.kv_mgr.kv_args.page_size, first
        if local.draft:
            page_size = local.draft.page_size
            first, pages = local.draft.in_reach(first, pages)
            end = first + len(pages) * page_size
        event = forward_event(local.pool_context.scheduler)
        handle = ReceiveHandle(pages, page_size, event, self.bootstrap_addr)
        channel = self.kv_mgr.decode_channel
        channel.open(
            handle, bootstrap_room=self.bootstrap_room, sources=plan.sources, first_token=first,
            end=end, cold=plan.cold, version=plan.version,
        )  # fmt: skip
        self.channel, self.handle = channel, handle

    def poll(self) -> Any:
        status, handle = super().poll(), self.handle  # type: ignore[misc]
        if handle is None or status != KVPoll.Success:
            return status
        self.channel.target_arrived(handle)
        if handle.state is None:
            if self.channel.is_lost(handle):
                self.channel.clear_now(handle)
            return KVPoll.Transferring
        if handle.state is act.State.FAILED:
            self._fail(f"[MIXKV-SELF-01] draft rows could not be cleared: {handle.reason}")
            return KVPoll.Failed
        return status

    def clear(self) -> None:
        """End the room. SGLang's failure_exception also calls this, with conclude_state set."""
        if self.handle is not None:
            reason = ""
            if self.conclude_state == KVPoll.Failed:
                records = self.kv_mgr.failure_records
                reason = records.get(self.bootstrap_room, "failed on another rank")
            self.channel.close(self.handle, reason)
        super().clear()  # type: ignore[misc]

    def _fail(self, reason: str) -> None:
        """Fail the request: SGLang's poll returns `conclude_state`. Notify prefill, if known."""
        logger.error("sglang-mixkv fails room %s: %s", self.bootstrap_room, reason)
        self.kv_mgr.record_failure(self.bootstrap_room, f"sglang-mixkv: {reason}")
        self.conclude_state = KVPoll.Failed
        self.ensure_abort_notified()  # type: ignore[attr-defined]
