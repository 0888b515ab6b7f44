"""The decode side's door: every control message is read and judged here before SGLang sees it.

Runs in SGLang's decode thread. What cannot be read, or comes from a rank that was not asked, is
dropped with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_mixkv.decode.registrations import Registrations
from sglang_mixkv.decode.rooms import Rooms, State
from sglang_mixkv.decode.sglang import SGLang
from sglang_mixkv.decode.verify import not_awaited
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol import messages
from sglang_mixkv.protocol.extension import Digest, decode_digest
from sglang_mixkv.protocol.frames import Frames
from sglang_mixkv.protocol.framing import Framing
from sglang_mixkv.protocol.messages import Aux, Poll, Status

ACK_TAG, AUX_TAG = b"ABORT_ACK", b"AUX_DATA"


@dataclass(frozen=True)
class Gate:
    """`judges`: whether this rank's rooms say who may answer (with a drafter; else SGLang does).

    `aux_lens`, `aux_rows`: bytes per row, and rows, of each of its metadata buffers. `framing`:
    where this backend and release of SGLang put what.
    """

    rooms: Rooms
    registrations: Registrations
    sglang: SGLang
    judges: bool
    aux_lens: tuple[int, ...]
    aux_rows: tuple[int, ...]
    framing: Framing

    def may_pass(self, message: Frames) -> bool:
        """Whether SGLang may read this message. Raises MixKVError for what is dropped."""
        digest = decode_digest(message)
        if digest is not None:
            self._digest(digest)
            return False
        if message[0] == ACK_TAG:
            messages.read_ack(message)
        elif message[0] == AUX_TAG and self.framing.has_aux_messages:
            self._aux(messages.read_aux(message, self.aux_lens, self.aux_rows))
        else:
            return self._status(messages.read_status(self.framing.untagged(message)))
        return True

    def _digest(self, said: Digest) -> None:
        room = self.rooms.get(said.room)
        if room is None or room.verified is None:
            raise not_awaited(said)
        room.verified.hear(said)

    def _status(self, said: Status) -> bool:
        """A success counts only from a rank that sends to this room, all else from one asked to.
        What arrives for no room, and a success for one that has not asked yet, is a late answer to
        the number's last request: SGLang would take it for this one's."""
        self._note_failure(said)
        room, success = self.rooms.get(said.room), said.status == Poll.SUCCESS
        if success and room is not None and room.state is State.INVITED:
            text = f"room {said.room}: success, before anything was asked for."
            raise MixKVError("MIXKV-ROOM-04", text)
        if not self.judges:
            return True
        if room is None:
            return False
        if said.prefill_rank not in (room.source.senders if success else room.source.contacted):
            raise MixKVError(
                "MIXKV-ROOM-04",
                f"room {said.room}: {'success' if success else 'no success'} from prefill rank "
                f"{said.prefill_rank}, which was not asked to send to it.",
            )
        return True

    def _note_failure(self, said: Status) -> None:
        """It may come after the room has ended: SGLang ends a request on all ranks when the first
        of them knows that it failed."""
        source = self.rooms.source(said.room)
        if said.reason and source is not None and said.prefill_rank in source.contacted:
            self.registrations.failed(source.address, said.reason)

    def _aux(self, said: Aux) -> None:
        """Metadata over the control channel: into the room's own row."""
        room = self.rooms.get(said.room)
        if room is not None and self.judges and said.row != room.aux_row:
            text = f"room {said.room}: aux row {said.row}, its own is {room.aux_row}."
            raise MixKVError("MIXKV-ROOM-04", text)
        if said.room not in self.sglang.statuses():
            text = f"room {said.room}: aux row {said.row}, there is no such room."
            raise MixKVError("MIXKV-ROOM-04", text)
