r"""The prefill servers of a decode rank, and their states.

    unknown --its facts match, SGLang has its ranks, connections are up--> ready
           \--> refused, with a reason; queried again for a later request

SGLang calls `try_ensure_parallel_info` once a second until it returns True. The call never blocks:
the first request to a server is delayed by one second, and a hung server does not delay the
scheduler. A refused server's requests fail in `receiver.init`, with the reason. Only until then is
a placeholder in SGLang's table, since SGLang's heartbeats query each server in it, and may hang.

Every address in a request is queried, so a server may be hung or hostile. Each server has its own
task in one event loop; a hung one occupies a connection, and a thread if its name cannot be
resolved. Other blocking calls run only once the facts match, in one thread per server.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.disaggregation.common.conn import PrefillServerInfo

from sglang_mixkv.background import Background
from sglang_mixkv.channel.handshake import Row
from sglang_mixkv.decode.cold import Cold
from sglang_mixkv.decode.plan import Plan, Rows, judge, make_plan
from sglang_mixkv.decode.transfer import Peer
from sglang_mixkv.engine.bootstrap import SIZES
from sglang_mixkv.engine.notices import RefusedRequests
from sglang_mixkv.engine.prefill_http import Names, Ranks, check_sizes, fetch, ranks_of
from sglang_mixkv.errors import MixKVError, refuse

if TYPE_CHECKING:
    from sglang_mixkv.engine.manager import DraftManager

logger = logging.getLogger(f"sglang.{__name__}")

ASKED_AT_ONCE, CONNECTED_AT_ONCE = 1024, 1024  # tasks; threads
MAX_LINKS = 8192  # ranks of all servers; each takes three file descriptors and some 85 KiB
AGAIN_S = 5.0  # before a refused server is queried again; that request waits a second
CHECK_S = 1.0  # between checks of a ready server; the longest pause between queries of a silent one
SOON_S = 0.05  # the first pause between queries of a silent server
KNOWN_S = 60.0  # without requests, after which a server that is not ready is forgotten

STAND_IN = PrefillServerInfo(
    attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, page_size=None,
    kv_cache_dtype=None, follow_bootstrap_room=True,
)  # fmt: skip
"""A placeholder for a refused server. With a DP size of 1, SGLang queries no DP rank."""


class _PrefillServer:
    """A server that is being queried, or is ready. `peers`, `gone` and SGLang's table change under
    the lock; the scheduler sets `asked`; the task owns the rest until the table has the server."""

    def __init__(self, address: str) -> None:
        self.address, self.asked = address, time.monotonic()
        self.rows: Rows = {}
        self.cold: Cold = ""  # why all its requests are cold, or ""
        self.peers: list[Peer] = []
        self.links = 0  # how many of MAX_LINKS the server's ranks use
        self.ready = self.doubted = self.gone = False
        # Keys: the ids of SGLang's entries. The values keep the entries from being freed.
        self.plans: dict[tuple[int, ...], tuple[Sequence[Any], Plan]] = {}


class _Refusal(msgspec.Struct):
    """Requests fail with `error`; `ranks` get ABORTs. No query of the server before `until`."""

    error: MixKVError
    ranks: Ranks
    until: float = float("inf")  # until the first request fails


class PrefillServers:
    """The prefill servers of a decode rank. `manager`: its `decode_channel` must exist. `own`: this
    rank's row. A server that SGLang's heartbeats removed is queried and connected again."""

    def __init__(self, manager: DraftManager, own: Row) -> None:
        self._manager, self._own = manager, own
        self._table: dict[str, Any] = manager.prefill_info_table
        self._channel = manager.decode_channel
        self._lock = threading.Lock()
        self._servers: dict[str, _PrefillServer] = {}
        self._refusals: dict[str, _Refusal] = {}
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)
        self._names = Names()
        self._background = Background("mixkv-ask", CONNECTED_AT_ONCE)
        self._aborts = RefusedRequests(self._background)

    # -- the scheduler's thread

    def ensure(self, address: str) -> bool:
        """Return whether the server is ready or refused. If refused, requests fail in `init`."""
        if address in self._table:
            return True
        now = time.monotonic()
        with self._lock:
            if address in self._table:  # added in the meantime
                return True
            refusal, server = self._refusals.get(address), self._servers.get(address)
            if refusal is not None and now < refusal.until:
                self._table[address] = STAND_IN
                return True
            if server is None or server.ready:
                self._drop(address)
                server = self._servers[address] = _PrefillServer(address)
                self._background.run(self._look_after(server))
            server.asked = now
        return False

    def refuse(self, address: str, receiver: Any) -> str | None:
        """Return why requests to this server fail; None if they do not. If they do, count this one,
        send SGLang's ABORT for its `receiver` to prefill, and remove the placeholder."""
        if (refusal := self._refusals.get(address)) is None:
            return None  # the usual case, without the lock
        with self._lock:
            if self._table.get(address) is STAND_IN:  # unless the server has become ready
                del self._table[address]
        refusal.until = min(refusal.until, time.monotonic() + AGAIN_S)
        self._manager.local.reporter.refused(refusal.error)
        if refusal.ranks:
            self._aborts.add(refusal.ranks, receiver)
        return f"prefill server {address} is refused: {refusal.error}"

    def plan(self, address: str, infos: Sequence[Any], receiver: Any) -> Plan:
        """Return the plan for these `bootstrap_infos`. If their ranks do not match, count the
        request and send its ABORT, as `refuse` does, and raise MixKVError."""
        server = self._servers.get(address)
        if server is None or not server.ready:
            raise MixKVError("MIXKV-PAIR-03", f"{address} is being resolved again. Retry.")
        key = tuple(map(id, infos))
        if key in server.plans:
            return server.plans[key][1]
        try:
            plan = make_plan(infos, server.rows, self._own, server.cold, address)
            server.plans[key] = tuple(infos), plan
            return plan
        except MixKVError as error:
            self._manager.local.reporter.refused(error)
            self._aborts.add(list(infos), receiver)
            server.doubted = True  # the known facts may predate the rank
            raise

    # -- any thread

    def forget(self, address: str) -> None:
        """Forget a restarted server: the next request reconnects. Also remove it from SGLang's
        tables, since SGLang's heartbeats did not notice the restart."""
        with self._lock:
            self._table.pop(address, None)
            self._refusals.pop(address, None)
            self._drop(address)
        with self._manager.connection_lock:
            pool = self._manager.connection_pool
            for key in [key for key in pool if key.startswith(f"{address}_")]:
                del pool[key]

    def check(self, address: str) -> None:
        """Schedule a check of a server: an unreachable rank may have restarted on a new port."""
        if (server := self._servers.get(address)) is not None:
            server.doubted = True

    def _drop(self, address: str) -> None:
        """Drop a server; the caller holds the lock."""
        if (server := self._servers.pop(address, None)) is not None:
            server.gone = True
            for peer in server.peers:
                self._channel.drop(peer)

    # -- the server's task, and its thread

    async def _look_after(self, server: _PrefillServer) -> None:
        pause, silent = SOON_S, ""
        while self._is_needed(server):
            try:
                if not server.ready:
                    await self._open(server)
                elif server.doubted:
                    server.doubted = False
                    await self._recheck(server)
            except MixKVError as error:
                return await self._refuse(server, error)
            except Exception as error:  # no answer, or not yet ready
                before, silent = silent, f"{type(error).__name__}: {error}"
                if silent != before:
                    text = "[MIXKV-MSG-02] sglang-mixkv: no facts of %s: %s"
                    logger.warning(text, server.address, silent)
            await asyncio.sleep(CHECK_S if server.ready else pause)
            pause = min(2 * pause, CHECK_S)

    def _is_needed(self, server: _PrefillServer) -> bool:
        with self._lock:
            is_asked = server.asked > time.monotonic() - KNOWN_S
            is_needed = server.address in self._table if server.ready else is_asked
            if not (is_needed or server.gone):
                self._drop(server.address)
            return not server.gone

    async def _open(self, server: _PrefillServer) -> None:
        async with self._places:
            server.rows = await fetch(server.address, self._names)
        info = await self._background.in_thread(self._connect, server)
        with self._lock:
            if not server.gone:
                self._refusals.pop(server.address, None)
                server.ready, self._table[server.address] = True, info

    async def _recheck(self, server: _PrefillServer) -> None:
        try:
            same = await fetch(server.address, self._names) == server.rows
        except MixKVError:
            same = False
        if not same and not server.gone:
            self.forget(server.address)

    async def _refuse(self, server: _PrefillServer, error: MixKVError) -> None:
        address = server.address
        async with self._places:
            refusal = _Refusal(error, await ranks_of(address, self._names))
        with self._lock:
            if server.gone:
                return
            self._drop(address)
            self._refusals[address] = refusal
        await asyncio.sleep(KNOWN_S)
        with self._lock:
            if self._refusals.get(address) is refusal:
                del self._refusals[address]
                self._table.pop(address, None)

    def _admit(self, server: _PrefillServer, info: PrefillServerInfo) -> list[Row]:
        """Return the rows of the ranks that requests may contact. Raises MixKVError for more ranks
        than the server's sizes allow, or than this process has file descriptors for."""
        rows = server.rows.values()
        stage = max((row.pp_rank for row in rows if row.draft), default=None)
        of_stage = (row for row in rows if row.pp_rank == stage and row.address)
        contacted = [row for row in of_stage if row.attn_tp_rank in info.target_tp_ranks]
        ranks = check_sizes([getattr(info, name) for name in SIZES])
        most = len(info.target_tp_ranks) * info.dp_size * info.attn_cp_size
        if len(rows) > ranks or len(contacted) > most:
            expected = f"facts of {ranks} ranks, {most} of them for this rank"
            got, remedy = f"{len(rows)} and {len(contacted)}", "Restart the prefill server"
            consequence = "some ranks could not be distinguished"
            raise refuse("MIXKV-PAIR-04", expected, got, consequence, remedy)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        places = min(MAX_LINKS, files // 6) if files > 0 else MAX_LINKS
        with self._lock:
            if len(contacted) + sum(s.links for s in self._servers.values()) > places:
                text = f"its {len(contacted)} ranks and those already connected would exceed the "
                text += f"{places} for which this process has files. Raise `ulimit -n`"
                raise MixKVError("MIXKV-MSG-02", text)
            server.links = len(contacted)
        return contacted

    def _connect(self, server: _PrefillServer) -> PrefillServerInfo:
        """Connect to each rank that requests may contact; return SGLang's entry for the server."""
        is_cold = self._manager.local.config.on_draft_mismatch == "cold"
        server.cold, served = judge(server.rows.values(), self._own, serve_mismatch=is_cold)
        for difference in served[:8]:
            logger.warning("[MIXKV-PAIR-06] prefill server %s: %s", server.address, difference)
        try:
            info = self._manager.resolve(server.address)
        except MixKVError:
            raise
        except Exception as error:  # if page sizes or KV dtypes differ
            raise MixKVError("MIXKV-PAIR-03", f"SGLang refuses it: {error}") from error
        if info is None:
            raise ConnectionError("SGLang's GET /route has failed")
        for row in self._admit(server, info):
            try:
                link = self._channel.dial(row, server.address)
            except Exception as error:
                text = f"the draft channel of the prefill rank at {row.address} cannot be reached"
                remedy = "Open that port from decode to prefill; SGLANG_MIXKV_PORT sets it"
                raise MixKVError("MIXKV-MSG-02", f"{text}: {error!r}. {remedy}") from error
            with self._lock:
                if not (is_given_up := server.gone):
                    server.peers.append(link.peer)
                    self._channel.add(link)
            if is_given_up:
                self._channel.hang_up(link)
                raise ConnectionAbortedError("the server was given up in the meantime")
        return info
