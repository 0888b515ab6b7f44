"""Notifies decode of an abort on prefill, with SGLang's own message.

fault   CommonKVSender.abort (disaggregation/common/conn.py) does not notify decode, which waits for
        SGLANG_DISAGGREGATION_WAITING_TIMEOUT, 300 s
patch   none yet
until   SGLang itself ends the request on decode

On decode, DraftManager.apply_prefill_status overrides SGLang's, and ignores unsafe aborts.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.background import MAX_NOTICES, Background
from sglang_mixkv.guards.room_reuse import RoomUse, newest
from sglang_mixkv.series import ABORTED

BLOCKED_AT_ONCE = 256  # sends, each to a different decode rank
POLL_S, LATE_S = 1.0, 300.0  # SGLang's timeout, after which decode no longer waits


class AbortedRequests:
    """Notifies decode of aborts on a prefill rank. `manager`: the rank's manager in SGLang."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._background = Background("mixkv-notify", BLOCKED_AT_ONCE)

    def add(self, sender: RoomUse) -> None:
        """Notify decode, unless SGLang has concluded the room. After Success, decode proceeds with
        it. After Failed, decode has been notified, or must not be, since it is unknown whether
        NIXL's writes have ended (transfer_worker in nixl/conn.py)."""
        room, manager = sender.bootstrap_room, self._manager
        if manager.request_status.get(room) in (None, KVPoll.Success, KVPoll.Failed):
            return
        is_place = len(self._background.running) < MAX_NOTICES
        if manager.enable_deferred_decode_kv_release and is_place:
            self._background.run(self._notify(sender, room, self._targets(room)))

    def _targets(self, room: int) -> Any:
        """Return the decode ranks that wait for this rank's KV; None until one sends metadata."""
        infos = list(self._manager.transfer_infos.get(room, {}).values())
        targets = {(one.endpoint, one.dst_port) for one in infos if not one.is_dummy}
        return targets if infos else None

    async def _notify(self, sender: RoomUse, room: int, targets: Any) -> None:
        until = time.monotonic() + LATE_S
        while targets is None and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
            targets = self._late(sender, room)
        fields = {"bootstrap_room": room, "status": KVPoll.Failed, "failure_reason": ABORTED}
        send, message = self._background.send, self._manager.send_kv_status_message  # logs errors
        await asyncio.gather(*(send(to, message, targets=[to], **fields) for to in targets or ()))

    def _late(self, sender: RoomUse, room: int) -> Any:
        """Return the targets of a room that was aborted before their metadata arrived: None while
        some is missing, () if there is nothing to do. Clear the room only once SGLang's
        bootstrap_thread has set its prefix and then its status. If SGLang's scheduler has yet to
        poll and clear the sender, keep the status: a missing one would mean WaitingForInput
        (NixlKVManager.check_status up to 0.5.22)."""
        tables = self._manager
        if newest.get(room) not in (None, sender):  # another request has the number
            return ()
        if room not in tables.req_to_decode_prefix_len or room not in tables.request_status:
            return None
        targets = self._targets(room) or ()
        if newest.get(room) is None:
            sender.clear()
        else:
            tables.req_to_decode_prefix_len.pop(room, None)
            tables.transfer_infos.pop(room, None)
        return targets
