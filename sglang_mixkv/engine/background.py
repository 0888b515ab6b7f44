"""An event loop beside SGLang's threads, and threads for what blocks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

logger = logging.getLogger(f"sglang.{__name__}")

MAX_UNWATCHED = 4096


class Background:
    """`threads`: how much may block at once, by asyncio.to_thread and in looking up names."""

    def __init__(self, name: str, threads: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(threads, name))
        self._unwatched: set[Future[Any]] = set()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run_unwatched(self, work: Coroutine[Any, Any, Any]) -> None:
        """Nobody asks for its end. What it raises is logged; beyond MAX_UNWATCHED it is left."""
        if len(self._unwatched) >= MAX_UNWATCHED:
            work.close()
            return
        future = self.run(work)
        self._unwatched.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[Any]) -> None:
        self._unwatched.discard(future)
        if error := future.exception():
            text = "[MIXKV-SELF-01] sglang-mixkv: the other side is not notified, and waits"
            logger.error(text, exc_info=error)
