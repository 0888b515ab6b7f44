"""The prefill side of one request."""

from __future__ import annotations

from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender


class MixKVSender(MooncakeKVSender):  # type: ignore[misc]
    """SGLang's sender; when it is cleared, nothing of its room is left behind."""

    def clear(self) -> None:
        super().clear()
        self.kv_mgr.forget_room(self.bootstrap_room)
