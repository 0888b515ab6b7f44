"""The decode side's door: every message is checked here before stock code reads it.

Runs in SGLang's decode thread, called by `Shared._may_pass`, which lets nothing raise there.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_ACK_TAG
from sglang.srt.runtime_context import get_device

from sglang_mixkv.core import frames as stock_frames
from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.wire import decode_digest
from sglang_mixkv.managers.shared import Shared
from sglang_mixkv.managers.staging import rows_for
from sglang_mixkv.managers.stats import TimedRows
from sglang_mixkv.managers.verify import Verifier


class DecodeGate(Shared):
    """What decode ranks hear, and from whom.

    `expected` says who sends to a room; `verifier` compares checksums of the rooms that it is
    asked for. Both are there before SGLang's constructor starts the decode thread.
    """

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        self.expected = {}
        self.rows = TimedRows(rows_for(get_device().device, getattr(args, "gpu_id", 0)), self.stats)
        self.verifier = Verifier(self.rows)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)

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
