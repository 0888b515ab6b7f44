"""The prefill side's door: every message is checked here before stock code reads it.

Runs in SGLang's bootstrap thread, called by `Shared._may_pass`, which lets nothing raise there.
What is refused is dropped with a reason, and the peer that can be told is told.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

from sglang_mixkv.core import frames as stock_frames
from sglang_mixkv.core import wire
from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.managers.aside import override
from sglang_mixkv.managers.peer import Peer, PeerRegistration, PrefillRank, admit
from sglang_mixkv.managers.shared import Shared

logger = logging.getLogger(__name__)

# How long a refused room, or metadata without a request, is remembered.
MEMORY_S = 60.0


class PrefillGate(Shared):
    """Overrides of MooncakeKVManager that admit peers and rooms on prefill ranks."""

    def _check_prefill(self, frames: list[bytes]) -> bool:
        """Every message to a prefill rank, before stock reads it. Raises MixKVError."""
        if frames[0] == b"None":
            return self._check_registration(frames)
        if frames[0] == ABORT_TAG:
            stock_frames.check_abort(frames)
            return True
        return self._check_metadata(frames)

    # -- peers

    def _check_registration(self, frames: list[bytes]) -> bool:
        stock_frames.check_registration(frames)
        size, rank = (int(frame or b"0") for frame in frames[16:18])
        try:
            if self.requires_dcp_relayout(size or 1, rank) and self.kv_args.num_draft_entries:
                raise MixKVError("decode context parallelism with a drafter is not supported.")
        except RuntimeError as error:
            raise MixKVError(str(error)) from None
        self.last_registration = frames
        return True

    @override(MooncakeKVManager)
    def _validate_peer_state_layout(self, registration_info: Any) -> tuple[bool, str | None]:
        """Stock's verdict on a registering peer, ours first: a reason refuses the peer."""
        session = registration_info.mooncake_session_id
        self.peers.pop(session, None)
        try:
            peer = self._admit(registration_info)
        except MixKVError as error:
            return False, f"sglang-mixkv refuses this decode rank: {error}"
        except Exception as error:
            logger.exception("sglang-mixkv could not read the registration of %s", session)
            return False, f"sglang-mixkv could not read this decode rank's registration: {error!r}"
        if peer is not None:
            self.peers[session] = peer
        verdict: tuple[bool, str | None] = super()._validate_peer_state_layout(registration_info)
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
        session = said.sender.session
        self._reap()
        self.grants.pop((said.room, session), None)
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
            return "its registration never arrived; it registers again with its next request"
        refused: str | None = self.state_layout_rejections.get(session)
        peer = self.peers.get(session)
        if refused is not None or peer is None or peer.plan is None:
            return refused
        room = self.transfer_infos.get(said.room, {})
        if len(room) >= peer.required_peers and session not in room:
            return f"room {said.room} has all its {len(room)} decode ranks already"
        try:
            grant = wire.decode_grant(frames)
            peer.check_metadata(said, np.frombuffer(frames[4], np.int32))
            if grant is not None:
                self.grants[said.room, session] = peer.check_grant(grant)
        except MixKVError as error:
            return str(error)
        return None

    def _reject_room(self, said: stock_frames.Metadata, reason: str) -> None:
        """Fail the room on both sides; a request that comes later fails at once too."""
        reason = f"room {said.room}: {reason}"
        logger.error("sglang-mixkv refuses %s (%s)", reason, said.sender.session)
        targets = [(said.sender.endpoint, said.sender.port)]
        if said.room in self.request_status:
            self.conclude_failure(bootstrap_room=said.room, failure_reason=reason, targets=targets)
            return
        self.rejected_rooms[said.room] = (time.monotonic(), reason)
        self.send_kv_status_message(
            targets=targets,
            bootstrap_room=said.room,
            status=KVPoll.Failed,
            failure_reason=reason,
        )

    def open_room(self, room: int) -> None:
        """A sender was made for this room: from now on it is the sender that ends it."""
        self.open_rooms.add(room)
        self.rooms_seen.pop(room, None)
        when, reason = self.rejected_rooms.pop(room, (0.0, ""))
        if reason and time.monotonic() - when < MEMORY_S:
            self.conclude_failure(bootstrap_room=room, failure_reason=reason)

    def forget_room(self, room: int) -> None:
        """The room's sender is cleared: nothing of the room stays."""
        self.open_rooms.discard(room)
        self.rooms_seen.pop(room, None)
        for table in (self.grants, self.sums):
            for key in [key for key in list(table) if key[0] == room]:
                table.pop(key, None)

    def _reap(self) -> None:
        """Drop metadata that no request came for within stock's bootstrap timeout."""
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
                self.forget_room(room)
        for room, (seen, _) in list(self.rejected_rooms.items()):
            if now - seen > MEMORY_S:
                self.rejected_rooms.pop(room, None)
