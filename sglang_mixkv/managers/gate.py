"""The prefill side's door: every message is checked here before stock code reads it.

Runs in SGLang's bootstrap thread, called by `Shared._may_pass`, which lets nothing raise there.
What is refused is dropped with a reason, and the peer that can be told is told.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortAck
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_mixkv.core import frames as stock_frames
from sglang_mixkv.core import wire
from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.registration import PeerRegistration
from sglang_mixkv.managers.aborts import MAX_REMEMBERED, PrefillAborts
from sglang_mixkv.managers.aside import override
from sglang_mixkv.managers.peer import Peer, PrefillRank, admit
from sglang_mixkv.managers.replies import Replies
from sglang_mixkv.managers.sent import Sent

logger = logging.getLogger(__name__)

# How long a refused room, or metadata without a request, is remembered.
MEMORY_S = 60.0


class PrefillGate(PrefillAborts):
    """Overrides of MooncakeKVManager that admit peers and rooms on prefill ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`unreadable`: sessions whose last registration was rejected unread, and why."""
        self.unreadable: dict[bytes, str] = {}
        self.replies = Replies()
        super().__init__(*args, **kwargs)

    def _check_prefill(self, frames: list[bytes]) -> bool:
        """Every message to a prefill rank, before stock reads it. Raises MixKVError."""
        if frames[0] == b"None":
            return self._check_registration(frames)
        if frames[0] == ABORT_TAG:
            return self._check_abort(stock_frames.check_abort(frames))
        return self._check_metadata(frames)

    def _check_abort(self, said: stock_frames.Abort) -> bool:
        """A room that has its decode ranks is ended by one of them. Stock answers its peers."""
        who = (said.endpoint, said.port)
        infos = list(self.transfer_infos.get(said.room, {}).values())
        ranks = {(info.endpoint, info.dst_port) for info in infos}
        if self._has_all_ranks(infos) and who not in ranks:
            raise MixKVError(f"room {said.room}: an abort by {who}, which has no part in it.")
        self._note_abort(said)
        peers = list(self.decode_kv_args_table.values())
        if not said.port or who in {(peer.endpoint, peer.dst_port) for peer in peers}:
            return True
        # Not registered (any more), so that nothing is in flight to it.
        active = self.request_status.get(said.room) not in (None, KVPoll.Success)
        if active and not self._is_of_last_request(said):
            self.update_status(said.room, KVPoll.Failed)
        if said.generation is not None:
            ack = AbortAck(said.room, self._prefill_unique_rank(), said.generation)
            self.replies.send(said.endpoint, said.port, ack.to_zmq())
        return False

    @staticmethod
    def _has_all_ranks(infos: list[Any]) -> bool:
        return any(len(infos) >= info.required_dst_info_num for info in infos)

    # -- peers

    def _check_registration(self, frames: list[bytes]) -> bool:
        try:
            stock_frames.check_registration(frames)
            self._check_dcp(int(frames[16] or b"1"), int(frames[17] or b"0"), int(frames[9]))
        except MixKVError as error:
            self._remember_unread(frames, error)
            raise
        except RuntimeError as error:  # stock's, which would end its thread
            self._remember_unread(frames, error)
            raise MixKVError(str(error)) from None
        self.unreadable.pop(frames[3], None)
        self.last_registration = frames
        return True

    def _remember_unread(self, frames: list[bytes], error: Exception) -> None:
        session = frames[3] if len(frames) > 3 else b""
        if len(session) < stock_frames.MAX_TEXT and len(self.unreadable) < MAX_REMEMBERED:
            self.unreadable[session] = f"its registration was turned down: {error}"

    def _check_dcp(self, size: int, rank: int, item_len: int) -> None:
        if not self.requires_dcp_relayout(size, rank):
            return
        if self.kv_args.num_draft_entries:
            raise MixKVError("decode context parallelism with a drafter is not supported.")
        self.prepare_dcp_token_item_lens([item_len] * len(self.kv_args.kv_item_lens), size)

    @override(MooncakeKVManager)
    def _init_dcp_pack_buffers_once(self, *args: Any, **kwargs: Any) -> None:
        """As stock; without the memory, each token is sent by itself."""
        try:
            super()._init_dcp_pack_buffers_once(*args, **kwargs)
        except Exception:
            logger.exception("sglang-mixkv: no buffers to pack for decode context parallelism")
            self._dcp_pack_buffers: list[Any] | None = []

    @override(MooncakeKVManager)
    def _validate_peer_state_layout(self, registration_info: Any) -> tuple[bool, str | None]:
        """Stock's verdict on a registering peer, ours first: a reason refuses the peer.

        Until then its last good plan stands: a transfer thread that found none would send as
        stock does, in the middle of a request.
        """
        session = registration_info.mooncake_session_id
        try:
            peer = self._admit(registration_info)
        except MixKVError as error:
            self.stats.refused(error)
            return False, f"sglang-mixkv refuses this decode rank: {error}"
        except Exception as error:
            self.stats.refused(error)
            logger.exception("sglang-mixkv could not read the registration of %s", session)
            return False, f"sglang-mixkv could not read this decode rank's registration: {error!r}"
        if peer is not None:
            self.peers[session] = peer
        verdict: tuple[bool, str | None] = super()._validate_peer_state_layout(registration_info)
        if not verdict[0]:
            self.stats.refused()
        return verdict

    def _admit(self, info: Any) -> Peer | None:
        frames = self.last_registration
        if frames is None:  # built piecemeal, without a bootstrap thread
            return None
        self.last_registration = None
        return admit(self._this_rank(), PeerRegistration(info, wire.decode(frames)))

    def _this_rank(self) -> PrefillRank:
        return PrefillRank(
            facts=self.facts,
            caches=self.caches,
            layer_ids=tuple(self.kv_args.kv_layer_ids),
            start_layer=getattr(self.kv_args, "prefill_start_layer", 0) or 0,
            stage=self.pp_rank or 0,
            last_stage=(self.pp_size or 1) - 1,
            sharded_state=self.sharded_state,
            cold_allowed=self.config.on_draft_mismatch == "cold",
        )

    # -- rooms

    def _check_metadata(self, frames: list[bytes]) -> bool:
        """Admit a room's metadata, or tell its decode rank why not."""
        try:
            said = stock_frames.check_metadata(frames)
        except MixKVError as error:
            unread = stock_frames.metadata_sender(frames)
            if unread is None:
                raise
            self._reject_room(unread, str(error))
            return False
        self._reap()
        reason = self._room_reason(said, frames)
        if reason is None:
            if said.room not in self.open_rooms:
                self.rooms_seen[said.room] = time.monotonic()
            return True
        self._reject_room(said, reason)
        return False

    def _room_reason(self, said: stock_frames.Metadata, frames: list[bytes]) -> str | None:
        """Why this room is not served for this peer, None when it is."""
        session = said.sender.session
        if session not in self.decode_kv_args_table:
            why = self.unreadable.get(session.encode(), "its registration never arrived")
            return f"{why.rstrip('.')}; it registers again with its next request"
        refused: str | None = self.state_layout_rejections.get(session)
        peer = self.peers.get(session)
        if refused is not None or peer is None:
            return refused
        info = self.decode_kv_args_table[session]
        if (said.sender.endpoint, said.sender.port) != (info.endpoint, info.dst_port):
            return f"it registered from {info.endpoint}:{info.dst_port}"
        if not self._may_join(said):
            return "it has all its decode ranks already"
        if said.prefix % self.kv_args.page_size:
            return f"a prefix of {said.prefix} tokens ends inside a page"
        try:
            grant = wire.decode_grant(frames)
            peer.check_metadata(said)
            self.grants.pop((said.room, session), None)
            if grant is not None:
                peer.check_grant(grant, len(said.pages))
                self.grants[said.room, session] = grant
        except MixKVError as error:
            return str(error)
        return None

    def _may_join(self, said: stock_frames.Metadata) -> bool:
        """Whether this decode rank is one of the room's, or can still become one."""
        room = self.transfer_infos.get(said.room, {})
        return said.sender.session in room or not self._has_all_ranks(list(room.values()))

    def _reject_room(self, said: stock_frames.Metadata, reason: str) -> None:
        """Fail the room on both sides; a request that comes later fails at once too.

        A room that others have made complete, or that is done, is theirs: only the sender is told.
        """
        reason = f"room {said.room}: {reason}"
        logger.error("sglang-mixkv refuses %s (%s)", reason, said.sender.session)
        status = self.request_status.get(said.room)
        if status is None:
            self._remember_rejected(said.room, reason)
        elif status != KVPoll.Success and self._may_join(said):
            self.fail_room(said.room, reason)
        verdict = self._encode_kv_status_message(
            bootstrap_room=said.room, status=KVPoll.Failed, failure_reason=reason
        )
        self.replies.send(said.sender.endpoint, said.sender.port, verdict)

    def open_room(self, room: int) -> Sent:
        """A sender was made for this room: from now on it is the sender that ends it."""
        sent = self.open_rooms[room] = Sent()
        self.rooms_seen.pop(room, None)
        when, reason = self.rejected_rooms.pop(room, (0.0, ""))
        if reason and time.monotonic() - when < MEMORY_S:
            self.fail_room(room, reason)
        return sent

    def check_integrity(self) -> list[str]:
        """As on either side; on a prefill rank once what is due has been reaped."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self._reap()
        return super().check_integrity()

    def forget_room(self, room: int) -> None:
        """The room's sender is cleared: nothing of the room stays but that it has ended."""
        self.ended_rooms[room] = time.monotonic()
        self.open_rooms.pop(room, None)
        self.rooms_seen.pop(room, None)
        for table in (self.grants, self.sums):
            for key in [key for key in list(table) if key[0] == room]:
                table.pop(key, None)

    def _reap(self) -> None:
        """Drop rooms that no sender ends: no request came for their metadata within stock's
        bootstrap timeout, or it was aborted and dropped."""
        now = time.monotonic()
        if now < self.next_reap:
            return
        self.next_reap = now + 1.0
        limit = max(MEMORY_S, float(self.bootstrap_timeout))
        for room, seen in list(self.rooms_seen.items()):
            if now - seen > limit and room not in self.open_rooms:
                self.rooms_seen.pop(room, None)
                self.transfer_infos.pop(room, None)
                self.request_status.pop(room, None)
                self.req_to_decode_prefix_len.pop(room, None)
                self.failure_records.pop(room, None)
                self.forget_room(room)
        for room, (seen, _) in list(self.rejected_rooms.items()):
            if now - seen > MEMORY_S:
                self.rejected_rooms.pop(room, None)
        for room, ended in list(self.ended_rooms.items()):
            if now - ended > MEMORY_S:
                self.ended_rooms.pop(room, None)
