"""The prefill side's door: every control message is read and judged here before SGLang sees it.

Runs in SGLang's control thread. What cannot be read is dropped with a reason; a peer or a room
that is refused hears why, and SGLang never hears of it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.prefill.peer import Peer
from sglang_mixkv.prefill.peers import Peers
from sglang_mixkv.prefill.rooms import MEMORY_S, Room, Rooms, State, taken
from sglang_mixkv.prefill.sglang import SGLang
from sglang_mixkv.protocol import messages, registration
from sglang_mixkv.protocol.frames import Address, Frames
from sglang_mixkv.protocol.framing import Framing
from sglang_mixkv.protocol.messages import Abort, Metadata, Poll
from sglang_mixkv.stats import Stats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gate:
    """`framing`: where this backend and release of SGLang put what.

    `awaited_s`: how long SGLang waits for the request of a room whose metadata came.
    """

    peers: Peers
    rooms: Rooms
    sglang: SGLang
    stats: Stats
    framing: Framing
    awaited_s: float

    def may_pass(self, message: Frames) -> bool:
        """Whether SGLang may read this message. Raises MixKVError for what is dropped."""
        if message[0] == messages.ABORT:
            return self._abort(messages.read_abort(message))
        message = self.framing.unguarded(message)
        if message[0] == b"None":
            return self._registration(message)
        return self._metadata(message)

    # -- peers

    def _registration(self, message: Frames) -> bool:
        at = self.framing.registration
        try:
            said = registration.read(message, at)
            self.sglang.check_dcp(said)
        except MixKVError as error:
            self.peers.note_unread(registration.session_of(message, at), str(error))
            self.stats.refused(error)
            raise
        try:
            self.peers.admit(said)
        except MixKVError as error:
            self.stats.refused(error)
            logger.error("sglang-mixkv refuses decode rank %s: %s", said.sender.session, error)
            return False
        return True

    # -- rooms

    def _metadata(self, message: Frames) -> bool:
        """Admit a room's metadata, or tell its decode rank why not."""
        number, sender = messages.metadata_sender(message, self.framing.metadata)
        now = time.monotonic()
        self.reap(now)
        try:
            said = messages.read_metadata(message, self.framing.metadata)
            peer = self._check(said)
        except MixKVError as error:
            self._reject(number, sender, str(error), now)
            return False
        self.rooms.join(said, peer, now)
        if self.sglang.statuses().get(number) == Poll.FAILED:  # its members have been told
            self.sglang.refuse(sender, number, f"[MIXKV-ROOM-04] room {number}: failed before")
            return False
        return True

    def _check(self, said: Metadata) -> Peer:
        """Whose room it is. Raises MixKVError unless it is served for this peer."""
        session = said.sender.session
        refusal, peer = self.peers.refusal(session), self.peers.get(session)
        if refusal is not None:
            raise refusal
        assert peer is not None, session
        if said.sender.at != peer.address.at:
            text = f"it registered from {peer.address.endpoint}:{peer.address.port}"
            raise MixKVError("MIXKV-REG-02", text)
        if self.rooms.is_taken(said.room):
            raise taken(said.room)
        if not self._may_join(said.room, session):
            raise MixKVError("MIXKV-ROOM-04", "it has all its decode ranks already")
        peer.check_metadata(said)
        return peer

    def _may_join(self, number: int, session: str) -> bool:
        room = self.rooms.get(number)
        return room is None or room.may_join(session)

    def _reject(self, number: int, sender: Address, reason: str, now: float) -> None:
        """Fail the room on both sides; a request that comes later fails at once too.

        A room that others have made complete, or that is done, is theirs: only the sender is told.
        """
        reason = f"room {number}: {reason}"
        logger.error("sglang-mixkv refuses %s (%s)", reason, sender.session)
        # First of all: what it is told is for it alone, the others hear that the room failed.
        self.sglang.refuse(sender, number, reason)
        status = self.sglang.statuses().get(number)
        theirs = status == Poll.SUCCESS or not self._may_join(number, sender.session)
        noted = theirs or (status is None and self.rooms.refuse(number, reason, now))
        if not noted:
            self.sglang.fail(number, reason)

    def reap(self, now: float) -> None:
        """Forget rooms that nothing will end: no request came for their metadata within
        SGLang's bootstrap timeout, or it was aborted and dropped."""
        for number in self.rooms.reap(now, max(MEMORY_S, self.awaited_s)):
            self.sglang.forget(number)

    # -- aborts

    def _abort(self, said: Abort) -> bool:
        """A decode rank gives a room up. It can come before this side has the request, or when
        the number is another request's already: SGLang forgets the first kind, ends the wrong
        request by the second, and keeps no reason for either."""
        room = self.rooms.get(said.room)
        mine = room is not None and room.has_member_at(said.endpoint, said.port)
        if room is not None and room.is_complete and not mine:
            who = (said.endpoint, said.port)
            text = f"room {said.room}: an abort by {who}, which has no part in it."
            raise MixKVError("MIXKV-ROOM-04", text)
        self._note_abort(said, room)
        if not said.port or self.peers.knows(said.endpoint, said.port):
            return True
        # Not registered (any more), so that nothing is in flight to it.
        active = self.sglang.statuses().get(said.room) not in (None, Poll.SUCCESS)
        if active and not self.is_of_last_request(said):
            self.sglang.mark_failed(said.room)
        if said.generation is not None:
            self.sglang.acknowledge(said)
        return False

    def _note_abort(self, said: Abort, room: Room | None) -> None:
        """Keep a reason for this side's log and answer, for a request still to come as well."""
        where = f" at {said.endpoint}:{said.port}" if said.port else ""
        reason = (
            f"[MIXKV-ROOM-02] room {said.room}: the decode rank{where} gave it up: aborted, "
            "failed, refused or timed out there; its log and its answer to the request say why"
        )
        status = self.sglang.statuses().get(said.room)
        late = room is not None and (room.reused or room.state is State.ENDED)
        refused = room is not None and room.state is State.REFUSED  # the first reason says more
        if status is None and not late and not refused:
            self.rooms.refuse(said.room, reason, time.monotonic())
        ended = status in (None, Poll.SUCCESS, Poll.FAILED)
        if not ended and not self.is_of_last_request(said):
            self.sglang.keep_reason(said.room, reason)

    def is_of_last_request(self, said: Abort) -> bool:
        """Whether an ABORT that follows metadata is for the request that had the number before:
        of the present one, no metadata has come from that rank, and messages keep their order."""
        room = self.rooms.get(said.room)
        if said.generation is None or room is None:
            return False
        late = room.reused or room.state is State.ENDED
        return late and not room.has_member_at(said.endpoint, said.port)
