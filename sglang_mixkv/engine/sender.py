"""A mixin for SGLang's sender that also passes its chunks to the draft channel."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.engine.gpu import forward_event
from sglang_mixkv.guards.room_reuse import RoomUse
from sglang_mixkv.prefill.worker import PrefillWorker, SendHandle

if TYPE_CHECKING:
    from sglang_mixkv.engine.manager import DraftManager

logger = logging.getLogger(f"sglang.{__name__}")


class DraftSender(RoomUse):
    """Mixed into CommonKVSender (manager.mixed). `handle`: None before init, and on a rank without
    draft KV. `poll` turns SGLang's Success into Transferring until draft KV is packed."""

    leaves = True
    kv_mgr: DraftManager
    handle: SendHandle | None = None
    channel: PrefillWorker  # set with `handle`
    _first = 0
    _early_send_wait_event: Any = None  # set by SGLang's scheduler, reset by its send

    def init(self, num_kv_indices: int, *args: Any, **kwargs: Any) -> None:
        super().init(num_kv_indices, *args, **kwargs)  # type: ignore[misc]
        channel = self.kv_mgr.prefill_channel
        if channel is not None and self.handle is None:
            self._pages, self._sent = num_kv_indices, 0
            self.channel, self.handle = channel, channel.begin(self.bootstrap_room)

    def pop_decode_prefix_len(self) -> int:
        """Return SGLang's prefix length, where the first chunk begins."""
        self._first = int(super().pop_decode_prefix_len())  # type: ignore[misc]
        return self._first

    def send(self, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
        self.kv_mgr.early = early = self._early_send_wait_event
        super().send(kv_indices, *args, **kwargs)  # type: ignore[misc]
        if self.handle is None:
            return
        try:
            self._hand_over(self.handle, kv_indices, kwargs, early)
        except Exception:  # without a last chunk, decode starts the drafter cold
            logger.exception("[MIXKV-SELF-01] a chunk's draft KV is not sent; its drafter is cold")

    def _hand_over(
        self, handle: SendHandle, pages: Any, kwargs: dict[str, Any], early: Any
    ) -> None:
        events, local = [early, kwargs.get("indices_event")], self.kv_mgr.local
        if self.kv_mgr.pp_size > 1:  # process_prefill_chunk sends while the forward may run
            events.append(forward_event(local.pool_context.scheduler))
        assert local.draft is not None
        page_size, count = local.draft.page_size, kwargs.get("num_kv_tokens")
        count = len(pages) * page_size if count is None else count
        self._sent += len(pages)
        first, self._first = self._first, self._first + count
        chunk = Pages(pages, page_size, [e for e in events if e is not None])
        last = self._sent >= self._pages
        self.channel.add_chunk(handle, first, count, last, chunk)

    def poll(self) -> Any:
        status = super().poll()  # type: ignore[misc]
        if self.handle is None or status != KVPoll.Success:
            return status
        released = self.channel.release(self.handle)
        return status if released else KVPoll.Transferring

    def clear(self) -> None:
        """End the room. SGLang's failure_exception also calls this, with conclude_state set."""
        self._end("failed on prefill" if self.conclude_state == KVPoll.Failed else "")
        super().clear()  # type: ignore[misc]

    def abort(self) -> None:
        self._end("aborted on prefill")
        try:
            self.kv_mgr.aborted.add(self)
        except Exception:  # decode waits for its timeout, as without the plugin
            logger.exception("[MIXKV-SELF-01] decode is not notified of an abort, and waits")
        super().abort()  # type: ignore[misc]

    def _end(self, reason: str) -> None:
        if self.handle is not None:
            self.channel.end(self.handle, reason)
