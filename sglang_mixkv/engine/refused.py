"""Ends prefill's half of a request that decode refuses.

Prefill would hold it for SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, 300 s, and a router that waits
for both halves its client. So the ranks of the refused server get SGLang's own ABORT, which is
all that they get. One that comes before the request is ignored (mooncake/conn.py
_handle_abort_notification): it is sent again. Releases up to 0.5.15 do not all know ABORT, and a
thread of theirs would end: they get none.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from typing import Any

from sglang_mixkv.engine.prefill_http import Ranks, ranks_of

logger = logging.getLogger(f"sglang.{__name__}")

SENT_AFTER_S = (0.2, 0.7, 2.0, 8.0)  # behind decode's own answer, which has the reason
RANKS_S = 10.0  # the ranks of a refused server are asked for anew after that
LINGER_MS = 1000  # for what was just sent
MAX_WAITING = 4096  # beyond it, prefill waits for its timeout


class RefusedRequests:
    """A task for each request, in a thread that starts with the first one and ends with the
    process: SGLang's send may block. `add` never blocks, and nothing is raised."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._ranks: dict[str, asyncio.Task[Ranks]] = {}
        self._class: Any = None

    def add(self, address: str, receiver: Any) -> None:
        """`receiver`: of SGLang, which has failed; its copy sends the messages."""
        try:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                run = threading.Thread(target=loop.run_forever, name="mixkv-refused", daemon=True)
                run.start()
                self._loop = loop
            self._loop.call_soon_threadsafe(self._begin, address, copy.copy(receiver))
        except RuntimeError:  # no more threads: prefill waits for its timeout
            logger.exception("[MIXKV-SELF-01] sglang-mixkv: prefill is not notified of a refusal")

    def _begin(self, address: str, receiver: Any) -> None:
        if self._loop is not None and len(self._waiting) < MAX_WAITING:
            if address not in self._ranks:
                self._ranks[address] = self._loop.create_task(self._ask(address))
                self._loop.call_later(RANKS_S, self._ranks.pop, address)
            task = self._loop.create_task(self._notify(self._ranks[address], receiver))
            self._waiting.add(task)
            task.add_done_callback(self._hang_up)

    async def _ask(self, address: str) -> Ranks:
        try:
            return await ranks_of(address)
        except Exception as error:
            logger.warning(
                "[MIXKV-MSG-02] sglang-mixkv: prefill server %s is refused, its ranks are not "
                "known: it may hold requests until its bootstrap timeout: %r", address, error,
            )  # fmt: skip
            return []

    async def _notify(self, asked: asyncio.Task[Ranks], receiver: Any) -> None:
        clock = asyncio.get_running_loop().time
        began, ranks = clock(), await asked
        for after in SENT_AFTER_S if ranks else ():
            await asyncio.sleep(began + after - clock())
            try:
                receiver.__class__ = self._with_own_sockets(receiver)
                receiver.bootstrap_infos, receiver.abort_notified = ranks, False
                receiver.ensure_abort_notified()
            except Exception:
                logger.exception("[MIXKV-SELF-01] sglang-mixkv: prefill is not notified")

    def _with_own_sockets(self, receiver: Any) -> Any:
        """SGLang's receivers share a socket for each endpoint, for good. A refused server's are
        closed here when nothing is left to send, and it may have named another server's ranks."""
        if self._class is None:
            own: dict[str, Any] = {"_socket_cache": {}, "_socket_locks": {}}
            self._class = type("RefusedReceiver", (type(receiver),), own)
        return self._class

    def _hang_up(self, ended: asyncio.Task[None]) -> None:
        self._waiting.discard(ended)
        if self._class is not None and not self._waiting:
            for socket in self._class._socket_cache.values():
                socket.close(linger=LINGER_MS)
            self._class = None
