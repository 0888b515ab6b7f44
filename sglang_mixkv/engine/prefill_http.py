"""HTTP requests to a prefill server, which may be hung or hostile, for its rows of facts or ranks.

Each request ends within ASK_S, whatever the server sends, and a response that is too long fails
while it is read. Redirects are not followed. Proxies are not used, since the channel's own
connections are direct too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Annotated, Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from sglang_mixkv.background import in_thread
from sglang_mixkv.channel.handshake import read_row
from sglang_mixkv.decode.plan import Rows
from sglang_mixkv.engine.bootstrap import MAX_RANKS, PATH, SIZES
from sglang_mixkv.errors import MixKVError, refuse

logger = logging.getLogger(f"sglang.{__name__}")

ASK_S = 5.0
MAX_BODY = 4 << 20  # 256 rows of 16 KiB, about ten times their real size
LOOKED_UP = 1024  # concurrent look-ups of names
FRESH_S = 0.3  # for a look-up, before the name's last result is used, if there is one
REMEMBERED = 4096  # names with a last result

Ranks = list[dict[str, Any]]


class _AllRows(msgspec.Struct, frozen=True):
    rows: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_RANKS)]


async def fetch(address: str, names: AbstractResolver) -> Rows:
    """Fetch all rows of a prefill server. Raises MixKVError if the server is incompatible; another
    exception if it does not answer, or is not ready."""
    try:
        async with asyncio.timeout(ASK_S):
            status, body = await _get(f"http://{address}{PATH}", {}, names)
    except TimeoutError:
        raise TimeoutError(f"no answer within {ASK_S:.0f} s") from None
    if status == 200:
        return read_rows(body)
    text = body[:512].decode(errors="replace")
    if status == 404:
        text = "it does not run sglang-mixkv, but this server does: it would write the drafter's "
        text += "rows into the target's pages. Start both with --enable-mixkv, or both without."
    elif status == 409:
        text += ". Start every node of the prefill server with --enable-mixkv."
    else:
        raise ConnectionError(f"{status} {text}")
    raise MixKVError("MIXKV-PAIR-01", text)


def read_rows(body: bytes) -> Rows:
    """Decode a response's rows. Raises MixKVError unless this build can read them."""
    try:
        answer = msgspec.json.decode(body, type=_AllRows)
        rows = [read_row(bytes(row)) for row in answer.rows]
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from None
    return {(row.rank_ip, row.rank_port): row for row in rows}


def _unreadable(error: object) -> MixKVError:
    remedy = "Install releases of sglang-mixkv with a common protocol on both sides"
    return MixKVError("MIXKV-PAIR-02", f"its facts cannot be read: {error}. {remedy}.")


def check_sizes(counts: Sequence[int]) -> int:
    """Return how many ranks a server of these SIZES has. Raises MixKVError for 0 or too many."""
    if min(counts) < 1 or (ranks := math.prod(counts)) > MAX_RANKS:
        expected, got = f"a prefill server of 1 to {MAX_RANKS} ranks", f"sizes {counts}"
        consequence = "decode would list and connect to them all"
        raise refuse("MIXKV-PAIR-04", expected, got, consequence, "Use a smaller server")
    return ranks


async def ranks_of(address: str, names: AbstractResolver) -> Ranks:
    """Fetch `rank_ip` and `rank_port` of all ranks of a refused prefill server from its bootstrap
    server (common/conn.py _handle_route_get), for SGLang's ABORT. On failure, log and return []."""
    try:
        async with asyncio.timeout(ASK_S):
            sizes = await _route(address, names, -1, -1, -1, -1)
            counts = [int(sizes[name]) for name in SIZES]
            check_sizes(counts)
            every = itertools.product(*map(range, counts))
            found = [await _route(address, names, *ranks) for ranks in every]
            # only IP addresses, as in facts
            addresses = [(str(ip_address(r["rank_ip"])), int(r["rank_port"])) for r in found]
            return [{"rank_ip": ip, "rank_port": port} for ip, port in addresses]
    except Exception as error:
        text = "[MIXKV-MSG-02] sglang-mixkv: prefill server %s is refused, but its ranks are "
        text += "unknown (%r): it may hold requests until its bootstrap timeout"
        logger.warning(text, address, error)
        return []


async def _route(address: str, names: AbstractResolver, *ranks: int) -> dict[str, Any]:
    keys = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    query = dict(zip(keys, ranks, strict=True))
    status, body = await _get(f"http://{address}/route", query, names)
    if status != 200:
        raise ConnectionError(f"{status} {body[:512].decode(errors='replace')}")
    return msgspec.json.decode(body, type=dict[str, Any])


async def _get(url: str, query: Mapping[str, Any], names: AbstractResolver) -> tuple[int, bytes]:
    """Return status and body. Do not decompress the body, since its size would be unbounded."""
    body, headers = bytearray(), {"Accept-Encoding": "identity"}
    by = aiohttp.TCPConnector(resolver=names, use_dns_cache=False)
    async with (
        aiohttp.ClientSession(connector=by, headers=headers, auto_decompress=False) as session,
        session.get(url, params=query, allow_redirects=False) as answer,
    ):
        async for part in answer.content.iter_any():
            body += part
            if len(body) > MAX_BODY:  # no honest server sends that much
                raise _unreadable(f"an answer of more than {MAX_BODY >> 20} MiB")
        return answer.status, bytes(body)


class Names(AbstractResolver):
    """A resolver for aiohttp, in threads. A look-up cannot be cancelled, and takes a minute if no
    name server answers. Each name has one look-up at a time, so it occupies one thread, and only
    requests to that server wait. If a look-up is slow or fails, the last result is used."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[list[ResolveResult]]] = {}
        self._answered: dict[str, list[ResolveResult]] = {}  # least recently used first

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found, look_up = self._answered.get(host), self._under_way.get(host)
        if look_up is None and len(self._under_way) < LOOKED_UP:
            look_up = asyncio.wrap_future(in_thread("mixkv-name", _addresses, host))
            look_up.add_done_callback(partial(self._ended, host))  # perhaps too late for this call
            self._under_way[host] = look_up
        if look_up is not None:
            await asyncio.wait([look_up], timeout=FRESH_S if found else None)
            found = self._answered.get(host) or found or look_up.result()
        if found is None:
            raise BlockingIOError(f"{LOOKED_UP} names are being looked up")
        self._remember(host, found)
        return [ResolveResult({**one, "port": port}) for one in found]

    def _ended(self, host: str, look_up: asyncio.Future[list[ResolveResult]]) -> None:
        del self._under_way[host]
        if not look_up.exception():
            self._remember(host, look_up.result())

    def _remember(self, host: str, found: list[ResolveResult]) -> None:
        self._answered.pop(host, None)
        self._answered[host] = found
        if len(self._answered) > REMEMBERED:
            del self._answered[next(iter(self._answered))]

    async def close(self) -> None: ...


def _addresses(host: str) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(hostname=host, host=str(at[0]), port=0, family=of, proto=proto, flags=flags)
        for of, _, proto, _, at in found
    ]
