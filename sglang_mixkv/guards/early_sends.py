"""Delays early sends over NIXL until their KV is written.

fault   SGLang sends a cached prefix when the forward of the rest begins (prefill.py,
        maybe_send_cached_prefix_chunk), and a chunk when the next chunk's begins. It passes along
        the event of the forward that writes this KV, but NIXL drops it (add_transfer_request in
        nixl/conn.py), and up to 0.5.21 Mooncake did not wait for it: even the target's KV can be
        sent before it is written
patch   upstream/nixl-early-sends.patch
until   all supported releases wait for the event, over both backends

SGLang's scheduler puts a chunk into a queue of NIXL's manager, from which one of SGLang's workers
posts it. The plugin replaces these queues: a chunk leaves its queue once its event has completed.
Early sends are disabled where SGLang has no such queues, and over Mooncake with SGLang 0.5.21. A
chunk whose event fails stays queued until the request times out in SGLang: unwritten bytes are
never sent.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from sglang_mixkv.draft.cuda import is_over, spare_captures

logger = logging.getLogger(f"sglang.{__name__}")

EARLY_SENDS = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
POLL_S = 1e-3
NEVER = SimpleNamespace(query=lambda: False)


class ChunkQueue:
    """Replaces the FastQueue of one of SGLang's workers. A room's chunks are returned in order,
    each once it is written; other rooms do not wait for them."""

    def __init__(self, manager: EarlySends) -> None:
        self._manager, self._put = manager, SimpleQueue[tuple[Any, Any]]()
        self._chunks: list[tuple[Any, Any]] = []  # with events; for the worker's thread only
        self._is_spared = not torch.cuda.is_available() or bool(torch.version.hip)

    def put(self, chunk: Any) -> None:
        self._put.put((chunk, self._manager.early))

    def get(self) -> Any:
        if not self._is_spared:  # in the worker's thread, which queries events from here on
            spare_captures()
            self._is_spared = True
        while (found := self._written()) is None:
            with suppress(Empty):
                self._chunks.append(self._put.get(timeout=POLL_S if self._chunks else None))
        return self._chunks.pop(found)[0]

    def _written(self) -> int | None:
        rooms = set[int]()
        for number, (chunk, event) in enumerate(self._chunks):
            try:
                if chunk.room not in rooms and (event is None or is_over(event)):
                    return number
            except Exception:
                text = "[MIXKV-SELF-01] KV of room %s may be incomplete: it is not sent"
                logger.exception(text, chunk.room)
                self._chunks[number] = chunk, NEVER
            rooms.add(chunk.room)
        return None


class EarlySends:
    """Mixed into NIXL's manager. `early`: the event of the chunk that SGLang is sending now."""

    early: Any = None

    @property
    def transfer_queues(self) -> list[ChunkQueue]:
        return self._queues

    @transfer_queues.setter
    def transfer_queues(self, queues: list[Any]) -> None:
        self._queues = [ChunkQueue(self) for _ in queues]  # SGLang then starts a worker for each


def switch_off_early_sends(manager: Any, release: str) -> str:
    """Disable SGLang's early sends if nothing waits until their KV is written; return a note for
    the log. An explicit setting by the operator takes precedence."""
    queues = getattr(manager, "transfer_queues", [None])
    waits = manager.backend == "mooncake" and not release.startswith("0.5.21")
    if EARLY_SENDS in os.environ or waits or all(isinstance(one, ChunkQueue) for one in queues):
        return ""
    os.environ[EARLY_SENDS] = "0"
    return f"; {EARLY_SENDS}=0, since SGLang's {manager.backend} does not wait"
