"""An event loop in a thread of its own, and threads for calls that may hang."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

logger = logging.getLogger(f"sglang.{__name__}")

MAX_NOTICES = 4096  # in flight, and sockets for them; beyond that, a server waits for its timeout


def in_thread(name: str, call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run `call` in a daemon thread of its own; return its future."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Background:
    """An event loop in a thread of its own. `threads`: how many blocking calls may run at once."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._places = name, asyncio.Semaphore(threads)
        self._loop = asyncio.new_event_loop()
        self.running: set[Future[Any]] = set()
        self._sending: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Start this coroutine without waiting for it; its exception is logged."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self.running.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[Any]) -> None:
        self.running.discard(future)
        if error := future.exception():
            text = "[MIXKV-SELF-01] sglang-mixkv: background work has failed"
            logger.error(text, exc_info=error)

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        async with self._places:
            return await asyncio.wrap_future(in_thread(self._name, call, *args))

    async def send(self, to: Any, message: Callable[..., None], **fields: Any) -> None:
        """Call `message(**fields)` in a thread, one call at a time per `to`: SGLang's sends block
        for up to 30 s if the other side is gone or stopped, so each `to` costs one thread."""
        async with self._sending.setdefault(to, asyncio.Lock()):
            await self.in_thread(partial(message, **fields))
