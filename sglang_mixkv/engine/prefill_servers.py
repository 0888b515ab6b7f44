r"""The prefill servers that a decode rank knows.

    unknown --its facts fit, SGLang knows its ranks, connections stand--> ready
           \--> refused, with a reason; asked again with a later request

SGLang calls `try_ensure_parallel_info` once a second until it is true. It never waits there: the
first request to a server loses that second, and one that is hung costs the scheduler nothing. A
server that is refused gets a stand-in in SGLang's table, so that its requests reach `receiver.init`
and fail there at once, with the reason.

Any address that a request names is asked, so a server may be hung, or hostile. All are asked in one
event loop, in which one that is hung costs a connection. What blocks follows only where the facts
fit, in a thread for each server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from sglang.srt.disaggregation.common.conn import PrefillServerInfo

from sglang_mixkv.decode.events import Peer
from sglang_mixkv.decode.plan import Plan, judge, make_plan
from sglang_mixkv.decode.worker import DecodeWorker
from sglang_mixkv.draft.facts import Row
from sglang_mixkv.engine.background import Background
from sglang_mixkv.engine.notices import RefusedRequests
from sglang_mixkv.engine.prefill_http import Rows, fetch
from sglang_mixkv.errors import MixKVError

logger = logging.getLogger(f"sglang.{__name__}")

ASKED_AT_ONCE, CONNECTED_AT_ONCE = 1024, 256  # tasks; threads
AGAIN_S = 5.0  # before a server that is refused is asked again, while a request waits a second
CHECK_S = 5.0  # between two looks at the facts of a server that is ready
KNOWN_S = 60.0  # a server that is not ready is forgotten if nobody has asked for it since


STAND_IN = PrefillServerInfo(
    attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, page_size=None,
    kv_cache_dtype=None, follow_bootstrap_room=True,
)  # fmt: skip
"""In the place of a refused server's sizes: with one DP rank the number of that is known."""


class _Server:
    """`work`: under way, with SGLang's entry as its result. `peers` and `gone` change under the
    lock; `rows` and `cold` are the work's until it is done, and everything else is the scheduler's.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = self.again = 0.0
        self.work: Future[Any] | None = None
        self.silent = ""  # why it could not answer last
        self.reason: MixKVError | None = None  # why it is refused
        self.rows: Rows = {}
        self.cold = ""  # why all of its requests are
        self.peers: list[Peer] = []
        self.ready = self.gone = False
        self.plans: dict[tuple[int, ...], Plan] = {}  # by identity of SGLang's entries


class PrefillServers:
    """`manager`: a DraftManager with its `decode_channel`. `own`: this rank's row.

    The scheduler's thread calls `ensure`, `refusal`, `plan` and `notify_refused`. `forget` and
    `check` may be called in any thread; they do not block. A server that SGLang takes from its
    table, as its heartbeats do, is asked and connected to anew.
    """

    def __init__(self, manager: Any, own: Row) -> None:
        self._manager, self._own = manager, own
        self._table: dict[str, Any] = manager.prefill_info_table
        self._channel: DecodeWorker = manager.decode_channel
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)
        self._background = Background("mixkv-ask", CONNECTED_AT_ONCE)
        self.notify_refused = RefusedRequests(self._background).add

    # -- the scheduler's thread

    def ensure(self, address: str) -> bool:
        """Whether it is ready; or refused, and requests fail in `receiver.init` with the reason."""
        if address in self._table:
            return True
        server = self._find(address)
        if server.work is None:
            if server.reason is not None and time.monotonic() < server.again:
                return self._refuse(server, server.reason)
            server.work = self._background.run(self._open(server))
        if not server.work.done():
            return False
        work, server.work = server.work, None
        try:
            info = work.result()
            server.ready, server.reason = True, None
            return self._put(server, info)
        except MixKVError as error:
            return self._refuse(server, error)
        except Exception as error:  # silent, or what nobody expects: the scheduler goes on
            server.reason, cause = None, f"{type(error).__name__}: {error}"
            if cause != server.silent:
                logger.warning("[MIXKV-MSG-02] sglang-mixkv: no facts of %s: %s", address, cause)
            server.silent = cause
            return False

    def _find(self, address: str) -> _Server:
        now = time.monotonic()
        with self._lock:
            for one in list(self._servers.values()):
                over = one.ready or one.asked < now - KNOWN_S
                if over and one.address not in self._table:
                    self._drop(self._servers.pop(one.address))
            server = self._servers.setdefault(address, _Server(address))
            server.asked = now
        return server

    def _refuse(self, server: _Server, error: MixKVError) -> bool:
        if error is not server.reason:
            if str(error) != str(server.reason):
                logger.error("sglang-mixkv refuses prefill server %s: %s", server.address, error)
            server.again = time.monotonic() + AGAIN_S
        server.reason, server.silent = error, ""
        return self._put(server, STAND_IN)

    def _put(self, server: _Server, info: Any) -> bool:
        with self._lock:
            if not server.gone:
                self._table[server.address] = info
            return not server.gone

    def refusal(self, address: str) -> str | None:
        """Why a server's requests fail. The stand-in goes, so that the next one may ask again."""
        server = self._servers.get(address)
        if server is None or server.reason is None:
            return None
        self._table.pop(address, None)
        self._manager.local.reporter.refused(server.reason)
        return f"prefill server {address} is refused: {server.reason}"

    def plan(self, address: str, infos: Sequence[Any]) -> Plan:
        """For the ranks of these `bootstrap_infos`. Raises MixKVError where they do not fit."""
        server = self._servers.get(address)
        if server is None or not server.ready:
            raise MixKVError("MIXKV-PAIR-03", f"{address} is being resolved anew. Retry.")
        key = tuple(map(id, infos))
        found = server.plans.get(key)
        if found is None:
            found = make_plan(infos, server.rows, self._own, server.cold, address)
            server.plans[key] = found
        return found

    # -- any thread

    def forget(self, address: str) -> None:
        """It was restarted: the next request asks anew, and connects anew."""
        with self._lock:
            self._table.pop(address, None)
            server = self._servers.pop(address, None)
            if server is not None:
                self._drop(server)

    def check(self, address: str) -> None:
        """A rank of it cannot be reached: was it restarted at another port?"""
        with self._lock:
            server, now = self._servers.get(address), time.monotonic()
            if server is not None and server.ready and now >= server.again:
                server.again = now + CHECK_S
                self._background.run(self._look_again(server))

    def _drop(self, server: _Server) -> None:
        """The caller has the lock."""
        server.gone = True
        self._hang_up(server)

    def _hang_up(self, server: _Server) -> None:
        """The caller has the lock."""
        while server.peers:
            self._channel.drop(server.peers.pop())

    # -- the loop, and its threads

    async def _open(self, server: _Server) -> Any:
        async with self._places:
            rows = await fetch(server.address)
        return await asyncio.to_thread(self._connect, server, rows)

    async def _look_again(self, server: _Server) -> None:
        try:
            same = await fetch(server.address) == server.rows
        except MixKVError:
            same = False
        if not same and not server.gone:
            self._manager.forget_server(server.address)

    def _connect(self, server: _Server, rows: Rows) -> Any:
        """SGLang's entry for it, once each rank of it is connected to that requests can contact."""
        server.rows = rows
        is_cold = self._manager.local.config.on_draft_mismatch == "cold"
        server.cold, served = judge(rows.values(), self._own, serve_mismatch=is_cold)
        for difference in served:
            logger.warning("[MIXKV-PAIR-06] prefill server %s: %s", server.address, difference)
        try:
            info = self._manager.resolve(server.address)
        except Exception as error:  # where page sizes or KV dtypes differ
            raise MixKVError("MIXKV-PAIR-03", f"SGLang refuses it: {error}") from error
        if info is None:
            raise ConnectionError("SGLang's GET /route has failed")
        try:
            for row in _to_connect(rows.values(), info):
                self._connect_to(server, row)
        except BaseException:
            with self._lock:
                self._hang_up(server)
            raise
        return info

    def _connect_to(self, server: _Server, row: Row) -> None:
        try:
            link = self._channel.dial(row, server.address)
        except Exception as error:
            raise MixKVError(
                "MIXKV-MSG-02",
                f"the draft channel of the prefill rank at {row.address} cannot be reached: "
                f"{error!r}. Open that port from decode to prefill; SGLANG_MIXKV_PORT fixes it",
            ) from error
        with self._lock:
            if not server.gone:
                server.peers.append(link.peer)
                self._channel.add(link)
                return
        self._channel.hang_up(link)
        raise ConnectionAbortedError("it was given up in the meantime")


def _to_connect(rows: Iterable[Row], info: Any) -> Iterable[Row]:
    """Rows of the ranks of the drafter's stage that this rank's requests can contact."""
    stage = max((row.pp_rank for row in rows if row.draft), default=None)
    ranks = set(info.target_tp_ranks)
    return {
        row.instance: row for row in rows
        if row.pp_rank == stage and row.attn_tp_rank in ranks and row.address
    }.values()  # fmt: skip
