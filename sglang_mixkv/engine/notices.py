"""SGLang's own ABORT, sent to the prefill ranks of a refused server. Without an ABORT, each rank
would hold the request for SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, 300 s, and a router that waits
for both sides' responses would keep its client waiting."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from sglang_mixkv.background import MAX_NOTICES, Background
from sglang_mixkv.engine.prefill_http import Ranks

PAUSES_S = (0.2, 0.5, 1.3, 6.0)  # before each ABORT; decode's answer, with the reason, goes first
LINGER_MS = 1000  # to deliver the last messages


class RefusedRequests:
    """The sender of ABORTs for refused requests. Each is sent several times: prefill ignores one
    that arrives before its request (mooncake/conn.py, _handle_abort_notification)."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._under_way = 0
        self._class: Any = None

    def add(self, ranks: Ranks, receiver: Any) -> None:
        """Send ABORTs to `ranks` from a copy of `receiver`, the failed request's."""
        sockets = getattr(self._class, "_socket_cache", ())
        if max(self._under_way, len(sockets)) < MAX_NOTICES:
            self._background.run(self._notify(ranks, copy.copy(receiver)))

    async def _notify(self, ranks: Ranks, receiver: Any) -> None:
        """Send over separate sockets. SGLang's receivers share one per endpoint and never close it,
        and the ranks may be another server's, since a refused server supplied them."""
        self._under_way += 1
        if self._class is None:
            own: dict[str, Any] = {"_socket_cache": {}, "_socket_locks": {}}
            self._class = type("RefusedReceiver", (type(receiver),), own)
        receiver.__class__, receiver.bootstrap_infos = self._class, ranks
        try:
            for pause in PAUSES_S:
                await asyncio.sleep(pause)
                receiver.abort_notified = False
                await self._background.send("refused", receiver.ensure_abort_notified)
        finally:
            self._under_way -= 1
            if not self._under_way:
                for socket in self._class._socket_cache.values():
                    socket.close(linger=LINGER_MS)
                self._class = None
