"""The decode side's door: every message is checked here before stock code reads it.

Runs in SGLang's decode thread, called by `Shared._may_pass`, which lets nothing raise there.
"""

from __future__ import annotations

from functools import cached_property

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_ACK_TAG

from sglang_mixkv.decode.verify import Verifier
from sglang_mixkv.engine.shared import Shared
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol import frames as stock_frames
from sglang_mixkv.protocol.extension import decode_digest


class DecodeGate(Shared):
    """What decode ranks hear, and from whom. `expected` says who sends to a room."""

    @cached_property
    def verifier(self) -> Verifier:
        """Compares checksums of the rooms that it is asked for."""
        return Verifier(self.caches, self.rows)

    @property
    def aux_rows(self) -> list[int]:
        """Rows of each aux buffer of this rank."""
        args = self.kv_args
        return [n // item for n, item in zip(args.aux_data_lens, args.aux_item_lens, strict=True)]

    def _check_decode(self, frames: list[bytes]) -> bool:
        """Every message to a decode rank, before stock reads it. Raises MixKVError."""
        digest = decode_digest(frames)
        if digest is not None:
            self.verifier.hear(digest)
            return False
        if frames[0] == ABORT_ACK_TAG:
            stock_frames.check_ack(frames)
        elif frames[0] == self.AUX_DATA_HEADER:
            args = self.kv_args
            self._check_aux(stock_frames.check_aux(frames, args.aux_item_lens, self.aux_rows))
        else:
            self._check_status(stock_frames.check_status(frames))
        return True

    def _check_status(self, said: stock_frames.Status) -> None:
        """A success counts only from a rank that sends to this room, all else from one asked to."""
        expected = self.expected.get(said.room)
        if expected is None:
            return
        success = said.status == KVPoll.Success
        if said.prefill_rank not in (expected.senders if success else expected.contacted):
            raise MixKVError(
                f"room {said.room}: {'success' if success else 'no success'} from prefill rank "
                f"{said.prefill_rank}, which was not asked to send to it."
            )

    def _check_aux(self, said: stock_frames.Aux) -> None:
        """Aux data over the control channel: into the room's own row."""
        expected = self.expected.get(said.room)
        if expected is not None and said.row != expected.aux_row:
            raise MixKVError(
                f"room {said.room}: aux row {said.row}, its own is {expected.aux_row}."
            )
        if said.room not in self.request_status:
            raise MixKVError(f"room {said.room}: aux row {said.row}, there is no such room.")
