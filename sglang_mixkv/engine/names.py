"""Threads for calls that may hang, and looking up the names of prefill servers in such.

A look-up cannot be ended, and takes a minute where a name server is silent. Each name has one at a
time, so that a name costs one thread, and only those who ask for it wait.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

AT_ONCE = 1024
FRESH_S = 0.3  # for a look-up of a name that was answered before
REMEMBERED = 4096  # names
NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class Threads:
    """A thread for each call, AT_ONCE at most, which ends with it and holds up no end of the
    process."""

    def __init__(self, name: str) -> None:
        self._name, self._running = name, set[Future[Any]]()

    def start(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except Exception as error:
                future.set_exception(error)

        try:
            if len(self._running) >= AT_ONCE:
                raise BlockingIOError(f"{AT_ONCE} threads {self._name} are busy")
            threading.Thread(target=run, name=self._name, daemon=True).start()
            self._running.add(future)
            future.add_done_callback(self._running.discard)
        except (OSError, RuntimeError) as error:  # no thread can be started
            future.set_exception(error)
        return future


class Names(AbstractResolver):
    """aiohttp's resolver. A name that was answered before has that answer where its look-up takes
    long, or fails."""

    def __init__(self) -> None:
        self._threads = Threads("mixkv-name")
        self._under_way: dict[str, Future[Any]] = {}
        self._answered: dict[str, list[Any]] = {}  # the one that was used last is the last

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found, waited = self._answered.get(host), asyncio.wrap_future(self._look_up(host))
        waited.add_done_callback(asyncio.Future.exception)  # nobody may wait for it any more
        await asyncio.wait([waited], timeout=FRESH_S if found else None)
        if waited.done() and not (found and waited.exception()):
            found = waited.result()
        assert found is not None
        self._answered.pop(host, None)
        self._answered[host] = found
        if len(self._answered) > REMEMBERED:
            del self._answered[next(iter(self._answered))]
        return [
            ResolveResult(
                hostname=host, host=address[0], port=port, family=of, proto=proto, flags=NUMERIC
            )
            for of, _, proto, _, address in found
        ]

    def _look_up(self, host: str) -> Future[Any]:
        if (future := self._under_way.get(host)) is None:
            future = self._under_way[host] = self._threads.start(_addresses, host)
            future.add_done_callback(lambda _: self._under_way.pop(host, None))
        return future

    async def close(self) -> None: ...


def _addresses(host: str) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
