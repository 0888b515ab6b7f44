r"""The prefill servers that a decode rank knows, and the one thread that asks them.

    unknown --GET /mixkv--> fits --SGLang's own table, connections--> ready
                        \--> refused, with a reason; asked again at most once a second

SGLang calls `try_ensure_parallel_info` about once a second until it is true. A server that is
refused gets a stand-in in SGLang's table, so that its requests reach `receiver.init` and fail there
at once, with the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import requests

from sglang_mixkv.decode.plan import Pairing, contacts_of, judge, make_plan
from sglang_mixkv.decode.worker import DecodeWorker
from sglang_mixkv.draft.facts import Row, read_row
from sglang_mixkv.engine.bootstrap import PATH
from sglang_mixkv.engine.refused import RefusedRequests
from sglang_mixkv.errors import MixKVError

logger = logging.getLogger(f"sglang.{__name__}")

ASK_S = 5.0  # for one answer
FIRST_WAIT_S = 0.2  # the scheduler waits so long for a server that it asks for the first time
AGAIN_S = 1.0  # between two questions to a server that was refused
MAX_BODY = 64 << 20
WORKERS = 4

Rows = dict[tuple[str, int], Row]


class NotYet(Exception):
    """The server cannot answer now."""


class _Server:
    def __init__(self) -> None:
        self.asking: Future[Rows] | None = None
        self.rows: Rows | None = None
        self.reason: MixKVError | None = None
        self.refused_at = 0.0
        self.silent = ""  # why it could not answer last
        self.waited = False  # the scheduler has waited for it once
        self.info: Any = None  # SGLang's, until it may be seen
        self.connecting: Future[None] | None = None
        self.pairings: dict[tuple[int, ...], Pairing] = {}  # by identity of SGLang's entries


class PrefillServers:
    """`own`: this rank's row. `resolve`: SGLang's own question; it puts a PrefillServerInfo into
    `table`. Called by the scheduler's thread alone, but for `forget`."""

    def __init__(
        self,
        own: Row,
        inbox: DecodeWorker,
        table: dict[str, Any],
        resolve: Callable[[str], bool],
        stand_in: Callable[[], Any],
        *,
        serve_mismatch: bool,
        refused: Callable[[MixKVError], None],
    ) -> None:
        self._own, self._inbox, self._table, self._resolve = own, inbox, table, resolve
        self._stand_in, self._serve_mismatch = stand_in, serve_mismatch
        self._refused = refused
        self._servers: dict[str, _Server] = {}
        self._instances: dict[bytes, str] = {}
        self._pool = ThreadPoolExecutor(WORKERS, "mixkv-ask")
        self._refused_requests = RefusedRequests()
        self.notify_refused = self._refused_requests.add

    def ensure(self, address: str) -> bool:
        """Whether requests to this server may go on: to be served, or to be failed in words."""
        if address in self._table:
            return True
        server = self._servers.setdefault(address, _Server())
        try:
            return self._step(address, server)
        except MixKVError as error:
            if server.reason is None or str(server.reason) != str(error):
                logger.error("sglang-mixkv refuses prefill server %s: %s", address, error)
            server.reason, server.refused_at = error, time.monotonic()
            server.rows = server.asking = server.connecting = server.info = None
            self._table[address] = self._stand_in()
            return True

    def _step(self, address: str, server: _Server) -> bool:
        if server.reason is not None and time.monotonic() - server.refused_at < AGAIN_S:
            raise server.reason
        if server.rows is None:
            server.rows = self._answer(address, server)
            if server.rows is None:
                return False
        if server.info is None:
            if not self._resolve(address):
                return False
            server.info = self._table.pop(address)
            wanted = self._to_connect(server)
            server.connecting = self._pool.submit(self._connect, wanted)
        assert server.connecting is not None
        if not _is_done(server, server.connecting):
            return False
        server.connecting.result()
        server.reason = None
        self._table[address] = server.info
        return True

    def _answer(self, address: str, server: _Server) -> Rows | None:
        """What the background has found out, if it has."""
        if server.asking is None:
            server.asking = self._pool.submit(fetch, address)
        if not _is_done(server, server.asking):
            return None
        asking, server.asking = server.asking, None
        try:
            rows = asking.result()
        except MixKVError:
            raise
        except Exception as error:  # NotYet, or what nobody expects: the scheduler goes on
            if str(error) != server.silent:
                server.silent = str(error)
                logger.warning("[MIXKV-MSG-02] sglang-mixkv: no facts of %s: %s", address, error)
            return None
        judge(rows.values(), self._own, serve_mismatch=self._serve_mismatch)
        others = {i: known for i, known in self._instances.items() if known != address}
        self._instances = others | {row.instance: address for row in rows.values()}
        return rows

    def _to_connect(self, server: _Server) -> list[Row]:
        """Rows of the ranks of the drafter's stage that this rank's requests can contact."""
        assert server.rows is not None
        stage = max((row.pp_rank for row in server.rows.values() if row.draft), default=None)
        ranks = set(server.info.target_tp_ranks)
        return [
            row for row in server.rows.values()
            if row.pp_rank == stage and row.attn_tp_rank in ranks and row.address
        ]  # fmt: skip

    def _connect(self, rows: list[Row]) -> None:
        for row in rows:
            if self._inbox.knows(row.instance):
                continue
            try:
                self._inbox.connect(row.instance, row)
            except Exception as error:
                raise MixKVError(
                    "MIXKV-MSG-02",
                    f"the draft channel of the prefill rank at {row.address} cannot be reached: "
                    f"{error!r}. Open that port from decode to prefill; SGLANG_MIXKV_PORT fixes it",
                ) from error

    def refusal(self, address: str) -> str | None:
        """Why a server's requests fail. The stand-in goes, so that the next one may ask again."""
        server = self._servers.get(address)
        if server is None or server.reason is None:
            return None
        self._table.pop(address, None)
        self._refused(server.reason)
        return f"prefill server {address} is refused: {server.reason}"

    def pairing(self, address: str, infos: Sequence[Any]) -> Pairing:
        """With the ranks of these `bootstrap_infos`. Raises MixKVError where they do not fit."""
        server = self._servers.get(address)
        if server is None:
            raise MixKVError("MIXKV-PAIR-03", f"prefill server {address} is being resolved anew.")
        key = tuple(map(id, infos))
        found = server.pairings.get(key)
        if found is None:
            rows: Mapping[tuple[str, int], Row] = server.rows or {}
            contacts = contacts_of(infos)
            plan = make_plan(contacts, rows, self._own, serve_mismatch=self._serve_mismatch)
            found = server.pairings[key] = Pairing(infos, plan)
            for difference in plan.differences:
                logger.warning("[MIXKV-PAIR-06] prefill server %s: %s", address, difference)
        return found

    def forget(self, address: str) -> None:
        """It has failed, or another is in its place: the next request asks anew."""
        self._servers.pop(address, None)

    def address_of(self, instance: bytes) -> str | None:
        return self._instances.pop(instance, None)

    def name_of(self, instance: bytes) -> str:
        """The server of this prefill rank, "" for one that was restarted since."""
        return self._instances.get(instance, "")

    def close(self) -> None:
        self._refused_requests.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _is_done(server: _Server, future: Future[Any]) -> bool:
    """The scheduler waits a moment the first time, so that a first request loses no second."""
    try:
        future.exception(0 if server.waited else FIRST_WAIT_S)
    except TimeoutError:
        server.waited = True
        return False
    return True


class _Answer(msgspec.Struct, frozen=True):
    protocol: int = 0
    rows: tuple[msgspec.Raw, ...] | None = None


def fetch(address: str) -> Rows:
    """All rows of a prefill server. MixKVError where it does not fit, NotYet where it is silent."""
    try:
        answer = requests.get(f"http://{address}{PATH}", timeout=ASK_S)
    except requests.RequestException as error:
        raise NotYet(str(error)) from error
    if answer.status_code == requests.codes.not_found:
        raise MixKVError(
            "MIXKV-PAIR-01",
            "it does not run sglang-mixkv, this decode server does: it would write the drafter's "
            "rows into the target's pages. Start both with --enable-mixkv, or both without.",
        )
    if answer.status_code == requests.codes.conflict:
        raise MixKVError(
            "MIXKV-PAIR-01",
            f"{answer.text[:512]}. Start every node of the prefill server with --enable-mixkv.",
        )
    if answer.status_code != requests.codes.ok:
        raise NotYet(f"{answer.status_code} {answer.text[:512]}")
    return read_rows(answer.content)


def read_rows(body: bytes) -> Rows:
    """Raises MixKVError for bytes that are no rows of a protocol that this build reads."""
    try:
        found = msgspec.json.decode(body[:MAX_BODY], type=_Answer)
        if found.rows is None:
            raise ValueError(f"protocol {found.protocol}, that of sglang-mixkv 0.1 and 0.2")
        rows = [read_row(bytes(row)) for row in found.rows]
    except (ValueError, RecursionError) as error:
        raise MixKVError(
            "MIXKV-PAIR-02",
            f"its facts cannot be read: {error}. Install releases of sglang-mixkv that have a "
            "protocol in common on both sides.",
        ) from None
    return {(row.rank_ip, row.rank_port): row for row in rows}
