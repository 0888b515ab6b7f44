"""An event loop in its own thread, threads for calls that may hang, and their shutdown at exit.

Every thread of the plugin is a daemon, so that none delays SGLang's exit. At exit, CPython ends a
daemon thread when it next requests the GIL. If that happens in a C++ destructor, in torch or a data
plane, the process aborts. So the plugin stops its threads first, and joins them briefly.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

logger = logging.getLogger(f"sglang.{__name__}")

MAX_NOTICES = 4096  # in flight, each with a socket; beyond this, a server waits until it times out
END_S = 0.5

stoppable: WeakSet[Any] = WeakSet()
"""Objects to stop at exit. `stop` tells the object's threads, which keep it alive, to end."""


@atexit.register
def end_threads() -> None:
    """Stop the plugin's threads, and wait up to END_S for all of them."""
    for one in list(stoppable):
        one.stop()
    until = time.monotonic() + END_S
    for thread in threading.enumerate():
        if thread.name.startswith("mixkv-"):
            thread.join(max(0.0, until - time.monotonic()))


def in_thread(name: str, call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run `call` in a new daemon thread; return its future."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Background:
    """An event loop in its own thread. `threads`: the limit of concurrent blocking calls."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._places = name, asyncio.Semaphore(threads)
        self._loop = asyncio.new_event_loop()
        self.running: set[Future[Any]] = set()
        self._sending: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()
        threading.Thread(target=self._run, name=name, daemon=True).start()
        stoppable.add(self)

    def _run(self) -> None:
        self._loop.run_forever()

    def stop(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)  # tasks that have not ended
        self._loop.call_soon_threadsafe(self._loop.stop)

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
        """Call `message(**fields)` in a thread, one call at a time per receiver `to`. SGLang's
        sends block for up to 30 s if the receiver is gone, so each receiver takes one thread."""
        async with self._sending.setdefault(to, asyncio.Lock()):
            await self.in_thread(partial(message, **fields))
