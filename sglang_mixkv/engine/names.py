"""Looks up the names of prefill servers, in threads.

A look-up cannot be cancelled, and takes a minute if no name server answers. Each name has one
look-up at a time, so that it costs one thread, and only requests to that server wait.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from functools import partial
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from sglang_mixkv.background import in_thread

AT_ONCE = 1024  # look-ups
FRESH_S = 0.3  # after which a name's last answer is used, if it has one
REMEMBERED = 4096  # names


class Names(AbstractResolver):
    """A resolver for aiohttp. If a name's look-up is slow or fails, its last answer is used."""

    def __init__(self) -> None:
        self._under_way: dict[str, Future[Any]] = {}
        self._answered: dict[str, list[ResolveResult]] = {}  # least recently used first

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found, waited = self._answered.get(host), asyncio.wrap_future(self._look_up(host))
        waited.add_done_callback(partial(self._ended, host))  # it may come too late for this call
        await asyncio.wait([waited], timeout=FRESH_S if found else None)
        found = self._answered.get(host) or found or waited.result()
        self._remember(host, found)
        return [ResolveResult({**one, "port": port}) for one in found]

    def _ended(self, host: str, look_up: asyncio.Future[list[ResolveResult]]) -> None:
        if not look_up.exception():
            self._remember(host, look_up.result())

    def _remember(self, host: str, found: list[ResolveResult]) -> None:
        self._answered.pop(host, None)
        self._answered[host] = found
        if len(self._answered) > REMEMBERED:
            del self._answered[next(iter(self._answered))]

    def _look_up(self, host: str) -> Future[Any]:
        future = self._under_way.get(host)
        if future is None and len(self._under_way) >= AT_ONCE:
            future = Future()
            future.set_exception(BlockingIOError(f"{AT_ONCE} names are being looked up"))
        elif future is None:
            future = self._under_way[host] = in_thread("mixkv-name", _addresses, host)
            future.add_done_callback(lambda _: self._under_way.pop(host, None))
        return future

    async def close(self) -> None: ...


def _addresses(host: str) -> list[ResolveResult]:
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(hostname=host, host=str(at[0]), port=0, family=of, proto=proto, flags=flags)
        for of, _, proto, _, at in socket.getaddrinfo(
            host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
    ]
