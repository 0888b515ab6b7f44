r"""The prefill servers that a decode rank knows, and the threads that ask and connect to them.

    unknown --GET /mixkv--> fits --SGLang's own table, connections--> ready
                        \--> refused, with a reason; asked again after a pause

SGLang calls `try_ensure_parallel_info` about once a second until it is true. A server that is
refused gets a stand-in in SGLang's table, so that its requests reach `receiver.init` and fail there
at once, with the reason.

Any address that a request names is asked, so a server may be hung, or hostile. Each is asked and
connected to in a thread of its own, and after a failure again only after as long a pause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from sglang_mixkv.decode.events import Peer
from sglang_mixkv.decode.plan import Plan, judge, make_plan
from sglang_mixkv.decode.worker import DecodeWorker
from sglang_mixkv.draft.facts import Row
from sglang_mixkv.engine.prefill_http import Rows, fetch
from sglang_mixkv.engine.refused import RefusedRequests
from sglang_mixkv.errors import MixKVError

logger = logging.getLogger(f"sglang.{__name__}")

WAITS_S, WAIT_SHARE = 0.4, 0.05  # how long the scheduler waits for new servers: see Patience
QUICK_S = 0.2  # the scheduler waits for servers whose last answer took no longer
AT_ONCE, SLOW_AT_ONCE = 256, 64  # threads
AGAIN_S, PAUSE_S = 1.0, 4.0  # before a server is asked again: if it was refused; at most
CHECK_S = 5.0  # between two looks at the facts of a server that is ready
KNOWN_S = 60.0  # a server that is not ready is forgotten if nobody has asked for it since


class Threads:
    """One for each piece of work: a server that is hung holds its own thread, and nobody else's.
    Slow servers have threads of their own, so that a new one need not wait for them."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(AT_ONCE), threading.Semaphore(SLOW_AT_ONCE)

    def start(self, do: Callable[[], Any], *, slow: bool) -> Future[Any] | None:
        """None where no thread is left for it."""
        work, free = Future[Any](), self._free[slow]

        def run() -> None:
            try:
                work.set_result(do())
            except BaseException as error:
                work.set_exception(error)
            finally:
                free.release()

        if not free.acquire(blocking=False):
            return None
        try:
            threading.Thread(target=run, name="mixkv-ask", daemon=True).start()
        except RuntimeError:  # the process has no more
            free.release()
            return None
        return work


class Patience:
    """How long SGLang's scheduler waits for new servers: WAITS_S at once, and WAIT_SHARE of its
    time in the long run. Each wait takes half of what is left, so that there is always some."""

    def __init__(self) -> None:
        self._left, self._seen = WAITS_S, time.monotonic()

    def wait(self, work: Future[Any]) -> None:
        began = time.monotonic()
        self._left = min(WAITS_S, self._left + WAIT_SHARE * (began - self._seen))
        wait([work], self._left / 2)
        self._seen = time.monotonic()
        self._left -= self._seen - began


class _Server:
    """Fields are the scheduler's, but `took` and `cold`, which its thread sets, and `peers`,
    `ready` and `gone`, which change under the lock. `work`: what a thread does for it now. `took`:
    seconds that the last work did."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = self.again = self.took = 0.0
        self.work: Future[Any] | None = None
        self.silent = ""  # why it could not answer last
        self.rows: Rows | None = None
        self.cold = ""  # why all of its requests are
        self.info: Any = None  # SGLang's, until it may be seen
        self.reason: MixKVError | None = None
        self.peers: list[Peer] = []
        self.ready = self.gone = False
        self.plans: dict[tuple[int, ...], Plan] = {}  # by identity of SGLang's entries


class PrefillServers:
    """`own`: this rank's row. `resolve`: SGLang's own question; it puts a PrefillServerInfo into
    `table`. `forget`: takes a server whose ranks were restarted unnoticed, and calls `forget` here.

    The scheduler's thread calls `ensure`, `refusal`, `plan` and `notify_refused`. `forget` and
    `check` may be called in any thread; they do not block. A server that SGLang takes from `table`,
    as its heartbeats do, is asked and connected to anew.
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
        self._servers: dict[str, _Server] = {}
        self._threads, self._patience = Threads(), Patience()
        self._refused_requests = RefusedRequests()
        self.notify_refused = self._refused_requests.add

    # -- the scheduler's thread

    def ensure(self, address: str) -> bool:
        """Whether it is ready; or refused, and requests fail in `receiver.init` with the reason."""
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
            for one in list(self._servers.values()):
                over = one.ready or one.asked < now - KNOWN_S
                if over and one.address not in self._table:
                    self._drop(self._servers.pop(one.address))
            server = self._servers.setdefault(address, _Server(address))
            server.asked = now
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
        if not self._do(server, self._connect):
            return False
        with self._lock:
            if server.gone:
                return False
            server.ready, server.reason = True, None
            self._table[server.address] = server.info
        return True

    def _sglangs(self, address: str) -> Any:
        """SGLang's entry for the server, which it fetches in this thread. Where page sizes or KV
        dtypes differ it raises, which would end the scheduler."""
        try:
            resolved = self._resolve(address)
        except Exception as error:
            raise MixKVError("MIXKV-PAIR-03", f"SGLang refuses it: {error}") from error
        return self._table.pop(address, None) if resolved else None

    def _do(self, server: _Server, step: Callable[[_Server], Any]) -> Any:
        """What `step` returns or raises, in a thread of its own; None until then. The scheduler
        waits a moment for a new server, so that its first request loses no second."""
        if server.work is None and time.monotonic() >= server.again:
            slow = server.took > QUICK_S
            server.work = self._threads.start(lambda: _timed(server, step), slow=slow)
            if server.work is not None and not slow:
                self._patience.wait(server.work)
        if server.work is None or not server.work.done():
            return None
        done, server.work = server.work, None
        if done.exception() is not None:
            server.again = time.monotonic() + min(server.took, PAUSE_S)
        else:  # it answers, however slowly: it must not wait for those that do not
            server.took = 0.0
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

    def _refuse(self, server: _Server, error: MixKVError) -> bool:
        if error is not server.reason:
            if str(error) != str(server.reason):
                logger.error("sglang-mixkv refuses prefill server %s: %s", server.address, error)
            server.again = max(server.again, time.monotonic() + AGAIN_S)
        server.reason, server.rows, server.info = error, None, None
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

    def plan(self, address: str, infos: Sequence[Any]) -> Plan:
        """For the ranks of these `bootstrap_infos`. Raises MixKVError where they do not fit."""
        server = self._servers.get(address)
        if server is None or not server.ready:
            raise MixKVError("MIXKV-PAIR-03", f"{address} is being resolved anew. Retry.")
        key = tuple(map(id, infos))
        found = server.plans.get(key)
        if found is None:
            rows = server.rows or {}
            found = server.plans[key] = make_plan(infos, rows, self._own, server.cold, address)
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
                self._threads.start(lambda: self._look_again(server), slow=True)

    def _drop(self, server: _Server) -> None:
        """The caller has the lock."""
        server.gone = True
        self._hang_up(server)

    def _hang_up(self, server: _Server) -> None:
        """The caller has the lock."""
        while server.peers:
            self._channel.drop(server.peers.pop())

    # -- work of threads

    def _fetch(self, server: _Server) -> Rows:
        rows = fetch(server.address)
        server.cold, served = judge(rows.values(), self._own, serve_mismatch=self._serve_mismatch)
        for difference in served:
            logger.warning("[MIXKV-PAIR-06] prefill server %s: %s", server.address, difference)
        return rows

    def _look_again(self, server: _Server) -> None:
        try:
            rows: Rows | None = fetch(server.address)
        except MixKVError:
            rows = None
        if rows != server.rows and not server.gone:
            self._forget(server.address)

    def _connect(self, server: _Server) -> bool:
        for row in _to_connect(server):
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
                    continue
            self._channel.hang_up(link)
            break
        return True


def _timed(server: _Server, step: Callable[[_Server], Any]) -> Any:
    began = time.monotonic()
    try:
        return step(server)
    finally:
        server.took = time.monotonic() - began


def _to_connect(server: _Server) -> Iterable[Row]:
    """Rows of the ranks of the drafter's stage that this rank's requests can contact."""
    rows = (server.rows or {}).values()
    stage = max((row.pp_rank for row in rows if row.draft), default=None)
    ranks = set(server.info.target_tp_ranks)
    return {
        row.instance: row for row in rows
        if row.pp_rank == stage and row.attn_tp_rank in ranks and row.address
    }.values()  # fmt: skip
