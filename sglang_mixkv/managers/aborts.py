"""Aborts on the prefill side: which request an ABORT ends, and with what reason.

A decode rank sends ABORT when a request was aborted, failed or timed out there. It can come
before this side has the request, or when the room's number is another request's already; stock
forgets the first kind, ends the wrong request by the second, and keeps no reason for any.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

from sglang_mixkv.core.frames import Abort
from sglang_mixkv.managers.aside import override
from sglang_mixkv.managers.replies import Notices
from sglang_mixkv.managers.shared import Shared

# How many rooms, or sessions, are remembered whose request or registration is still to come.
MAX_REMEMBERED = 1 << 16


class PrefillAborts(Shared):
    """Overrides of MooncakeKVManager that act when either side gives a request up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`ended_rooms`: whose sender was cleared lately, and when."""
        self.ended_rooms: dict[int, float] = {}
        self.notices = Notices()
        super().__init__(*args, **kwargs)

    def _note_abort(self, said: Abort) -> None:
        """Keep a reason for this side's log and answer, for a request still to come as well."""
        room, where = said.room, f" at {said.endpoint}:{said.port}" if said.port else ""
        reason = (
            f"room {room}: the decode rank{where} gave it up: aborted, failed, refused or timed "
            "out there; its log and its answer to the request say why"
        )
        status = self.request_status.get(room)
        unknown = status is None and room not in self.ended_rooms
        if unknown:
            self._remember_rejected(room, reason)
        ended = status in (None, KVPoll.Success, KVPoll.Failed)
        if not ended and not self._is_of_last_request(said):
            with self.failure_lock:
                self.failure_records.setdefault(room, reason)

    def _remember_rejected(self, room: int, reason: str) -> None:
        """A request that comes for this room fails at once; beyond the bound, by its timeout."""
        if len(self.rejected_rooms) < MAX_REMEMBERED:
            self.rejected_rooms[room] = (time.monotonic(), reason)

    def fail_room(self, room: int, reason: str) -> None:
        """As conclude_failure, in a thread that must not wait for a peer that does not read."""
        targets = self._room_notify_targets(room)
        concluded = self.conclude_failure(bootstrap_room=room, failure_reason=reason, targets=[])
        if concluded is None:  # there is no such room
            return
        verdict = self._encode_kv_status_message(
            bootstrap_room=room, status=KVPoll.Failed,
            failure_reason=self.failure_records.get(room, reason),
        )  # fmt: skip
        for endpoint, port in targets:
            self.notices.send(endpoint, port, verdict)

    def _is_of_last_request(self, said: Abort) -> bool:
        """Whether an ABORT that follows metadata is for the request that had the number before:
        of the present one, no metadata has come from that rank, and messages keep their order."""
        if said.generation is None or said.room not in self.ended_rooms:
            return False
        present = list(self.transfer_infos.get(said.room, {}).values())
        return (said.endpoint, said.port) not in {(i.endpoint, i.dst_port) for i in present}

    @override(MooncakeKVManager)
    def _handle_deferred_abort_notification(self, notification: Any, room_active: bool) -> None:
        """As stock, which acknowledges; only the request that was given up ends."""
        said = Abort(
            notification.room,
            notification.decode_ip or "",
            notification.decode_port or 0,
            notification.generation,
        )
        room_active = room_active and not self._is_of_last_request(said)
        super()._handle_deferred_abort_notification(notification, room_active)

    def abandon_room(self, room: int) -> None:
        """The scheduler aborts the room's sender: tell decode, and reap the room if the sender
        is never cleared (SGLang drops requests that wait or are chunked so)."""
        if room not in self.request_status:
            return
        self.fail_room(room, f"room {room}: aborted by the prefill server")
        self.open_rooms.pop(room, None)
        self.rooms_seen[room] = time.monotonic()
