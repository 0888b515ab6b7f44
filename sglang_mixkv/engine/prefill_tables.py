"""SGLang's tables of one prefill rank, as prefill/ asks for them (prefill/sglang.py)."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortAck

from sglang_mixkv.engine.replies import Notices, Replies
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol.frames import Address
from sglang_mixkv.protocol.messages import Abort
from sglang_mixkv.protocol.registration import Registration


class PrefillTables:
    """`manager`: SGLang's, of a prefill rank."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._replies, self._notices = Replies(), Notices()

    def statuses(self) -> Any:
        return self._manager.request_status

    def rooms(self) -> list[int]:
        """PPConsensusStore, the table of a pipeline, cannot be iterated."""
        statuses = self._manager.request_status
        return list(getattr(statuses, "_local_map", statuses))

    def fail(self, room: int, reason: str) -> None:
        """As conclude_failure, without waiting for a peer that does not read."""
        manager = self._manager
        there = manager._room_notify_targets(room)  # the scheduler may end the room before we tell
        ended = manager.conclude_failure(bootstrap_room=room, failure_reason=reason, targets=[])
        if ended is None:  # there is no such room
            return
        verdict = self._verdict(room, manager.failure_records.get(room, reason))
        joined = manager._room_notify_targets(room)  # meanwhile, and is not told otherwise
        for endpoint, port in dict.fromkeys([*there, *joined]):
            self._notices.send(endpoint, port, verdict)

    def _verdict(self, room: int, reason: str) -> list[bytes]:
        """SGLang's message that a room failed."""
        message: list[bytes] = self._manager._encode_kv_status_message(
            bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason
        )
        return message

    def takes_back(self, session: str) -> bool:
        return bool(self._manager.takes_back(session))

    def note_unsettled(self, room: int) -> None:
        if self._manager.enable_deferred_decode_kv_release:
            self._manager.poison_deferred_ack_room(room)

    def mark_failed(self, room: int) -> None:
        self._manager.update_status(room, KVPoll.Failed)

    def keep_reason(self, room: int, reason: str) -> None:
        with self._manager.failure_lock:
            self._manager.failure_records.setdefault(room, reason)

    def forget(self, room: int) -> None:
        manager = self._manager
        for table in (
            manager.transfer_infos,
            manager.request_status,
            manager.req_to_decode_prefix_len,
            manager.failure_records,
        ):
            table.pop(room, None)

    def refuse(self, who: Address, room: int, reason: str) -> None:
        self._replies.send(who.endpoint, who.port, self._verdict(room, reason))

    def acknowledge(self, abort: Abort) -> None:
        assert abort.generation is not None
        ack = AbortAck(abort.room, self._manager._prefill_unique_rank(), abort.generation)
        self._replies.send(abort.endpoint, abort.port, ack.to_zmq())

    def check_dcp(self, registration: Registration) -> None:
        manager, size = self._manager, registration.dcp_size
        try:
            if not manager.requires_dcp_relayout(size, registration.dcp_rank):
                return
            draft = manager.kv_args.num_draft_entries
            if draft and not manager.has_dcp_with_draft:
                text = "decode context parallelism with a drafter is not supported over NIXL."
                raise MixKVError("MIXKV-PAIR-04", text)
            target = len(manager.kv_args.kv_item_lens) - draft
            lens = [registration.kv_item_len] * target + [None] * draft
            manager.prepare_dcp_token_item_lens(lens, size)
        except RuntimeError as error:  # SGLang's own, which would end its control thread
            raise MixKVError("MIXKV-PAIR-07", str(error)) from None
