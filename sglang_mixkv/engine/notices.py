"""SGLang's own ABORT to the prefill ranks of a refused server, each of which would hold the request
for SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, 300 s, and a router that waits for both halves its
client. SGLang's sends block for up to 30 s where the other side is gone, or stands still: a thread
sends.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from sglang_mixkv.background import MAX_NOTICES, Background
from sglang_mixkv.engine.prefill_http import Ranks

PAUSES_S = (0.2, 0.5, 1.3, 6.0)  # before each ABORT; decode's own answer has the reason, and leads
LINGER_MS = 1000  # for what was just sent


class RefusedRequests:
    """Sends SGLang's own ABORT to the ranks of a refused server, which is all that they get. One
    that comes before the request is ignored (mooncake/conn.py _handle_abort_notification): it is
    sent again."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._under_way = 0
        self._class: Any = None

    def add(self, ranks: Ranks, receiver: Any) -> None:
        """`receiver`: of SGLang, which fails; its copy sends the messages."""
        if self._under_way < MAX_NOTICES:
            self._background.run(self._notify(ranks, copy.copy(receiver)))

    async def _notify(self, ranks: Ranks, receiver: Any) -> None:
        """SGLang's receivers share a socket for each endpoint, for good. A refused server may have
        named another server's ranks: these are others, closed when nothing is left to send."""
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
