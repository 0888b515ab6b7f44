"""Ends prefill's half of a request that decode refuses.

Prefill would hold it for SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, 300 s, and a router that waits
for both halves its client. So the ranks of the refused server get SGLang's own ABORT, which is
all that they get. One that comes before the request is ignored (mooncake/conn.py
_handle_abort_notification): it is sent again. Releases up to 0.5.15 do not all know ABORT, and a
thread of theirs would end: they get none.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from sglang_mixkv.engine.asking import Get, NotYet, ask

logger = logging.getLogger(f"sglang.{__name__}")

SENT_AFTER_S = (0.2, 0.7, 2.0, 8.0)  # behind decode's own answer, which has the reason
LINGER_MS = 1000  # for what was just sent
MAX_WAITING = 4096
MAX_RANKS = 4096

Ranks = list[dict[str, Any]]


class RefusedRequests:
    """One thread, started with the first request. `add` never blocks, and nothing is raised."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[Callable[[], Ranks], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._class: Any = None

    def add(self, ranks: Callable[[], Ranks], receiver: Any) -> None:
        """`ranks`: of the server, as far as they are known then. `receiver`: of SGLang, which has
        failed; its copy sends the messages."""
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="mixkv-refused", daemon=True)
                thread.start()
                self._thread = thread
            self._new.put((ranks, copy.copy(receiver)))
        except RuntimeError:  # no more threads: prefill waits for its timeout
            logger.exception("[MIXKV-SELF-01] sglang-mixkv: prefill is not notified of a refusal")

    def close(self) -> None:
        self._new.put(None)

    def _run(self) -> None:
        waiting: list[tuple[float, int, Callable[[], Ranks], Any]] = []
        number = itertools.count()
        while True:
            wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            try:
                added = self._new.get(timeout=wait_s)
            except queue.Empty:
                _, _, ranks, receiver = heapq.heappop(waiting)
                self._notify(ranks(), receiver)
                if not waiting:
                    self._hang_up()
                continue
            if added is None:
                self._hang_up()
                return
            if len(waiting) < MAX_WAITING:  # beyond it, prefill waits for its timeout
                for delay in SENT_AFTER_S:
                    heapq.heappush(waiting, (time.monotonic() + delay, next(number), *added))

    def _notify(self, ranks: Ranks, receiver: Any) -> None:
        try:
            receiver.__class__ = self._with_own_sockets(receiver)
            receiver.bootstrap_infos, receiver.abort_notified = ranks, False
            receiver.ensure_abort_notified()
        except Exception:
            logger.exception("[MIXKV-SELF-01] sglang-mixkv: prefill is not notified of a refusal")

    def _with_own_sockets(self, receiver: Any) -> Any:
        """SGLang's receivers share a socket for each endpoint, for good. A refused server's are
        closed here when nothing is left to send, and it may have named another server's ranks."""
        if self._class is None:
            own: dict[str, Any] = {"_socket_cache": {}, "_socket_locks": {}}
            self._class = type("RefusedReceiver", (type(receiver),), own)
        return self._class

    def _hang_up(self) -> None:
        if self._class is not None:
            for socket in self._class._socket_cache.values():
                socket.close(linger=LINGER_MS)
            self._class = None


def ranks_of(address: str) -> Ranks:
    """`rank_ip` and `rank_port` of all ranks of a prefill server; none where that is not known."""
    try:
        return ask(address, _ranks)
    except Exception as error:
        logger.warning(
            "[MIXKV-MSG-02] sglang-mixkv: prefill server %s is refused, its ranks are not known: "
            "it may hold requests until its bootstrap timeout: %r", address, error,
        )  # fmt: skip
        return []


async def _ranks(get: Get) -> Ranks:
    """As SGLang's bootstrap server has them (common/conn.py _handle_route_get)."""
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")

    async def route(*ranks: int) -> dict[str, Any]:
        status, body = await get("/route", dict(zip(names, ranks, strict=True)))
        if status != 200:
            raise NotYet(f"{status} {body[:512].decode(errors='replace')}")
        return dict(json.loads(body))

    sizes = await route(-1, -1, -1, -1)
    if "prefill_http_port" not in sizes:  # since 0.5.16, as ABORT over each backend
        return []
    counts = [int(sizes[f"{name}_size"]) for name in ("dp", "attn_cp", "attn_tp", "pp")]
    if min(counts) < 1 or math.prod(counts) > MAX_RANKS:
        raise NotYet(f"{counts} ranks")
    found = [await route(*ranks) for ranks in itertools.product(*map(range, counts))]
    return [{"rank_ip": str(r["rank_ip"]), "rank_port": int(r["rank_port"])} for r in found]
