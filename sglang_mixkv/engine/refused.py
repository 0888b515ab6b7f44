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
import logging
import queue
import threading
import time
from typing import Any

import requests
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(f"sglang.{__name__}")

SENT_AFTER_S = (0.2, 0.7, 2.0, 8.0)  # behind decode's own answer, which has the reason
MAX_WAITING = 4096
ASK_S = 5.0  # for one answer
KNOWN_S = 10.0  # a server's ranks are asked for anew after that


class RefusedRequests:
    """One thread, started with the first request. `add` never blocks, and nothing is raised."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ranks: dict[str, tuple[float, list[dict[str, Any]]]] = {}

    def add(self, address: str, receiver: Any) -> None:
        """`receiver`: of SGLang, which has failed; its copy sends the messages."""
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="mixkv-refused", daemon=True)
                thread.start()
                self._thread = thread
            self._new.put((address, copy.copy(receiver)))
        except RuntimeError:  # no more threads: prefill waits for its timeout
            logger.exception("[MIXKV-SELF-01] sglang-mixkv: prefill is not notified of a refusal")

    def close(self) -> None:
        self._new.put(None)

    def _run(self) -> None:
        waiting: list[tuple[float, int, str, Any]] = []
        number = itertools.count()
        while True:
            wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            try:
                added = self._new.get(timeout=wait_s)
            except queue.Empty:
                _, _, address, receiver = heapq.heappop(waiting)
                self._notify(address, receiver)
                continue
            if added is None:
                return
            if len(waiting) < MAX_WAITING:  # beyond it, prefill waits for its timeout
                for delay in SENT_AFTER_S:
                    heapq.heappush(waiting, (time.monotonic() + delay, next(number), *added))

    def _notify(self, address: str, receiver: Any) -> None:
        """`ensure_abort_notified` itself raises nothing."""
        asked, ranks = self._ranks.get(address, (-KNOWN_S, []))
        if time.monotonic() - asked > KNOWN_S:
            known = _ranks_if_known(address)
            for gone in set(map(_endpoint, ranks)) - set(map(_endpoint, known)):
                receiver.disconnect_endpoint(gone)
            ranks = known
            self._ranks[address] = time.monotonic(), ranks
        receiver.bootstrap_infos, receiver.abort_notified = ranks, False
        receiver.ensure_abort_notified()


def _endpoint(rank: dict[str, Any]) -> str:
    """As SGLang's receiver connects to it (CommonKVReceiver._connect_to_bootstrap_server)."""
    return str(NetworkAddress(rank["rank_ip"], rank["rank_port"]).to_tcp())


def _ranks_if_known(address: str) -> list[dict[str, Any]]:
    try:
        return ranks_of(address)
    except Exception as error:
        logger.warning(
            "[MIXKV-MSG-02] sglang-mixkv: prefill server %s is refused, its ranks are not known: "
            "it may hold requests until its bootstrap timeout: %r", address, error,
        )  # fmt: skip
        return []


def ranks_of(address: str) -> list[dict[str, Any]]:
    """`rank_ip` and `rank_port` of all ranks of a prefill server, as SGLang's bootstrap server has
    them (common/conn.py _handle_route_get)."""
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    with requests.Session() as session:

        def get(*ranks: int) -> dict[str, Any]:
            query = dict(zip(names, ranks, strict=True))
            answer = session.get(f"http://{address}/route", params=query, timeout=ASK_S)
            answer.raise_for_status()
            return dict(answer.json())

        sizes = get(-1, -1, -1, -1)
        if "prefill_http_port" not in sizes:  # since 0.5.16, as ABORT over each backend
            return []
        counts = (sizes[f"{n}_size"] for n in ("dp", "attn_cp", "attn_tp", "pp"))
        found = [get(*ranks) for ranks in itertools.product(*map(range, counts))]
    return [{"rank_ip": str(r["rank_ip"]), "rank_port": int(r["rank_port"])} for r in found]
