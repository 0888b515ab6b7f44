r"""The prefill servers that a decode rank knows, and the threads that ask and connect to them.

    unknown --GET /mixkv--> fits --SGLang's own table, connections--> ready
                        \--> refused, with a reason; asked again after a pause

SGLang calls `try_ensure_parallel_info` about once a second until it is true. A server that is
refused gets a stand-in in SGLang's table, so that its requests reach `receiver.init` and fail there
at once, with the reason.

Any address that a request names is asked, so a server may be hung, or hostile. Each is asked and
connected to in a thread of its own (workers.py), and after a failure not before as long a pause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sglang_mixkv.decode.events import Peer
from sglang_mixkv.decode.plan import Pairing, contacts_of, judge, make_plan
from sglang_mixkv.decode.worker import DecodeWorker
from sglang_mixkv.draft.facts import Row
from sglang_mixkv.engine.asking import Rows, fetch
from sglang_mixkv.engine.refused import Ranks, RefusedRequests, ranks_of
from sglang_mixkv.engine.workers import Patience, Work, Workers
from sglang_mixkv.errors import MixKVError

logger = logging.getLogger(f"sglang.{__name__}")

FIRST_WAIT_S = 0.2  # the scheduler waits so long for a new server at most, over all its calls
AGAIN_S, PAUSE_S = 1.0, 4.0  # before a server is asked again: if it was refused; at most
CHECK_S = 5.0  # between two looks at the facts of a server that is ready
KNOWN_S = 60.0  # a server that is not ready is forgotten if nobody has asked for it since
RANKS_S = 10.0  # the ranks of a refused server are asked for anew after that


class _Server:
    """Fields are the scheduler's, but `peers`, `ready` and `gone`, which change under the lock.
    `work`: what a thread does for it now, or `check` for one that is ready."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = self.again = 0.0
        self.patience = FIRST_WAIT_S
        self.work: Work | None = None
        self.failed = False  # once at least
        self.silent = ""  # why it could not answer last
        self.rows: Rows | None = None
        self.info: Any = None  # SGLang's, until it may be seen
        self.reason: MixKVError | None = None
        self.ranks: Ranks = []  # of one that is refused, once they are known
        self.ranks_asked = -RANKS_S
        self.peers: list[Peer] = []
        self.ready = self.gone = False
        self.pairings: dict[tuple[int, ...], Pairing] = {}  # by identity of SGLang's entries


class PrefillServers:
    """`own`: this rank's row. `resolve`: SGLang's own question; it puts a PrefillServerInfo into
    `table`. `forget`: takes a server whose ranks were restarted unnoticed, and calls `forget` here.

    The scheduler's thread calls `ensure`, `refusal`, `pairing` and `notify_refused`. `forget` and
    `check` may be called in any thread; they do not block.
    """

    def __init__(
        self,
        own: Row,
        channel: DecodeWorker,
        table: dict[str, Any],
        resolve: Callable[[str], bool],
        stand_in: Callable[[], Any],
        *,
        serve_mismatch: bool,
        refused: Callable[[MixKVError], None],
        forget: Callable[[str], None] | None = None,
    ) -> None:
        self._own, self._channel, self._table, self._resolve = own, channel, table, resolve
        self._stand_in, self._serve_mismatch = stand_in, serve_mismatch
        self._refused, self._forget = refused, forget or self.forget
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}  # those asked for last are the last
        self._workers, self._patience = Workers(), Patience()
        self._refused_requests = RefusedRequests()

    # -- the scheduler's thread

    def ensure(self, address: str) -> bool:
        """Whether requests to this server may go on: to be served, or to be failed in words."""
        if address in self._table:
            return True
        server = self._find(address)
        try:
            return self._step(server)
        except MixKVError as error:
            return self._refuse(server, error)

    def _find(self, address: str) -> _Server:
        now = time.monotonic()
        with self._lock:
            server = self._servers.pop(address, None) or _Server(address)
            self._servers[address] = server
            server.asked = now
            while (oldest := next(iter(self._servers.values()))).asked < now - KNOWN_S:
                del self._servers[oldest.address]
                if oldest.address in self._table:
                    self._servers[oldest.address], oldest.asked = oldest, now
                else:
                    self._drop(oldest)
        return server

    def _step(self, server: _Server) -> bool:
        if server.reason is not None and time.monotonic() < server.again:
            raise server.reason
        if server.rows is None:
            server.rows = self._do(server, self._fetch)
            if server.rows is None:
                return False
        if server.info is None:
            server.info = self._sglangs(server.address)
            if server.info is None:
                return False
        if not server.ready and not self._do(server, self._connect):
            return False
        with self._lock:
            if server.gone:
                return False
            server.ready, server.reason = True, None
            self._table[server.address] = server.info
        return True

    def _sglangs(self, address: str) -> Any:
        """Its own question is asked in this thread. Where page sizes or KV dtypes differ it raises,
        which would end the scheduler."""
        try:
            resolved = self._resolve(address)
        except Exception as error:
            raise MixKVError("MIXKV-PAIR-03", f"SGLang refuses it: {error}") from error
        return self._table.pop(address, None) if resolved else None

    def _refuse(self, server: _Server, error: MixKVError) -> bool:
        now = time.monotonic()
        if server.reason is None or str(server.reason) != str(error):
            logger.error("sglang-mixkv refuses prefill server %s: %s", server.address, error)
        if error is not server.reason:
            server.again = max(server.again, now + AGAIN_S)
        server.reason, server.rows, server.info = error, None, None
        if now - server.ranks_asked > RANKS_S:
            server.ranks_asked = now
            self._workers.start(lambda: self._ask_ranks(server), failed=True)
        with self._lock:
            self._hang_up(server)
            if not server.gone:
                self._table[server.address] = self._stand_in()
            return not server.gone

    def refusal(self, address: str) -> str | None:
        """Why a server's requests fail. The stand-in goes, so that the next one may ask again."""
        server = self._servers.get(address)
        if server is None or server.reason is None:
            return None
        self._table.pop(address, None)
        self._refused(server.reason)
        return f"prefill server {address} is refused: {server.reason}"

    def notify_refused(self, address: str, receiver: Any) -> None:
        server = self._servers.get(address)
        if server is not None:
            self._refused_requests.add(lambda: server.ranks, receiver)

    def pairing(self, address: str, infos: Sequence[Any]) -> Pairing:
        """With the ranks of these `bootstrap_infos`. Raises MixKVError where they do not fit."""
        server = self._servers.get(address)
        if server is None or not server.ready:
            raise MixKVError("MIXKV-PAIR-03", f"prefill server {address} is being resolved anew.")
        key = tuple(map(id, infos))
        found = server.pairings.get(key)
        if found is None:
            rows: Mapping[tuple[str, int], Row] = server.rows or {}
            mismatch, contacts = self._serve_mismatch, contacts_of(infos)
            plan = make_plan(contacts, rows, self._own, serve_mismatch=mismatch, server=address)
            found = server.pairings[key] = Pairing(infos, plan)
            for difference in plan.differences:
                logger.warning("[MIXKV-PAIR-06] prefill server %s: %s", address, difference)
        return found

    # -- any thread

    def forget(self, address: str) -> None:
        """It has failed, or was restarted: the next request asks anew, and connects anew."""
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
                self._workers.start(lambda: self._look_again(server), failed=True)

    def close(self) -> None:
        self._refused_requests.close()
        self._workers.close()
        with self._lock:
            for server in self._servers.values():
                self._drop(server)
            self._servers.clear()

    def _drop(self, server: _Server) -> None:
        """The caller has the lock."""
        server.gone = True
        self._hang_up(server)

    def _hang_up(self, server: _Server) -> None:
        """The caller has the lock."""
        while server.peers:
            self._channel.drop(server.peers.pop())

    # -- work

    def _do(self, server: _Server, work: Callable[[_Server], Any]) -> Any:
        """What `work` returns or raises, in a thread of its own; None until then. The scheduler
        waits a moment for a new server, so that its first request loses no second."""
        if server.work is None and time.monotonic() >= server.again:
            server.work = self._workers.start(lambda: work(server), failed=server.failed)
        if server.work is None:
            return None
        server.patience -= self._patience.wait(server.work, max(0.0, server.patience))
        if not server.work.done():
            return None
        done, server.work = server.work, None
        if done.exception() is not None:
            server.failed, server.again = True, time.monotonic() + min(done.took, PAUSE_S)
        try:
            return done.result()
        except MixKVError:
            raise
        except Exception as error:  # NotYet, or what nobody expects: the scheduler goes on
            server.reason = None
            if str(error) != server.silent:
                server.silent, address = str(error), server.address
                logger.warning("[MIXKV-MSG-02] sglang-mixkv: no facts of %s: %s", address, error)
            return None

    def _fetch(self, server: _Server) -> Rows:
        rows = fetch(server.address)
        judge(rows.values(), self._own, serve_mismatch=self._serve_mismatch)
        return rows

    def _ask_ranks(self, server: _Server) -> None:
        server.ranks = ranks_of(server.address)

    def _connect(self, server: _Server) -> bool:
        for row in self._to_connect(server):
            try:
                link = self._channel.dial(row, server.address)
            except Exception as error:
                raise MixKVError(
                    "MIXKV-MSG-02",
                    f"the draft channel of the prefill rank at {row.address} cannot be reached: "
                    f"{error!r}. Open that port from decode to prefill; SGLANG_MIXKV_PORT fixes it",
                ) from error
            with self._lock:
                gone = server.gone
                if not gone:
                    server.peers.append(link.peer)
                    self._channel.add(link)
            if gone:
                self._channel.hang_up(link)
                break
        return True

    def _to_connect(self, server: _Server) -> Iterable[Row]:
        """Rows of the ranks of the drafter's stage that this rank's requests can contact."""
        rows = (server.rows or {}).values()
        stage = max((row.pp_rank for row in rows if row.draft), default=None)
        ranks = set(server.info.target_tp_ranks)
        return {
            row.instance: row for row in rows
            if row.pp_rank == stage and row.attn_tp_rank in ranks and row.address
        }.values()  # fmt: skip

    def _look_again(self, server: _Server) -> None:
        try:
            rows: Rows | None = fetch(server.address)
        except MixKVError:
            rows = None
        if rows != server.rows and not server.gone:
            self._forget(server.address)
