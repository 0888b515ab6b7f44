"""Sends SGLang's own ABORT to the prefill ranks of a refused server. Each would otherwise hold the
request for SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, 300 s, and a router that waits for both halves
would hold its client.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from sglang_mixkv.background import MAX_NOTICES, Background
from sglang_mixkv.engine.prefill_http import Ranks

PAUSES_S = (0.2, 0.5, 1.3, 6.0)  # before each ABORT; decode's answer has the reason and goes first
LINGER_MS = 1000  # for what was just sent


class RefusedRequests:
    """An ABORT that comes before its request is ignored (mooncake/conn.py,
    _handle_abort_notification), so it is repeated."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._under_way = 0
        self._class: Any = None

    def add(self, ranks: Ranks, receiver: Any) -> None:
        """`receiver`: SGLang's, which fails; a copy of it sends the messages."""
        if self._under_way < MAX_NOTICES:
            self._background.run(self._notify(ranks, copy.copy(receiver)))

    async def _notify(self, ranks: Ranks, receiver: Any) -> None:
        """Send over sockets of its own. SGLang's receivers share one for each endpoint, for good,
        and a refused server may have named ranks of another server."""
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
