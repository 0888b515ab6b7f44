"""The prefill side of one request."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender


class MixKVSender(MooncakeKVSender):  # type: ignore[misc]
    """SGLang's sender; when it is cleared, nothing of its room is left behind."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kw: Any
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kw)
        mgr.open_room(bootstrap_room)

    def clear(self) -> None:
        super().clear()
        self.kv_mgr.forget_room(self.bootstrap_room)
