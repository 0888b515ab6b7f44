"""Holds an early send over NIXL back until its KV is written.

fault   A prefix that prefill has cached is sent while the forward of the rest begins (prefill.py,
        maybe_send_cached_prefix_chunk), and with each further chunk the one before. The event
        behind the forward that writes it goes along; NIXL drops it (add_transfer_request in
        nixl/conn.py), and Mooncake did not wait for it up to 0.5.21: the target's own KV can
        leave before it is written
patch   upstream/nixl-early-sends.patch
until   all releases that are served wait, over both backends

SGLang's scheduler puts a chunk into a queue of NIXL's manager, and a worker of SGLang's posts it.
The queues are the plugin's: a chunk leaves one once its event has come. Where SGLang has none that
can be replaced, and over Mooncake of 0.5.21, early sends are switched off.
"""

from __future__ import annotations

import os
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from sglang_mixkv.draft.cuda import is_over

EARLY_SENDS = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
LOOK_S = 1e-3


class ChunkQueue:
    """A queue in place of SGLang's FastQueue, for one worker. A chunk comes out once it is written,
    in the order of its room; another room's does not wait for it."""

    def __init__(self, manager: EarlySends) -> None:
        self._manager, self._put = manager, SimpleQueue[tuple[Any, Any]]()
        self._chunks: list[tuple[Any, Any]] = []  # the worker's, each with its event

    def put(self, chunk: Any) -> None:
        self._put.put((chunk, self._manager.early))

    def get(self) -> Any:
        while (found := self._written()) is None:
            with suppress(Empty):
                self._chunks.append(self._put.get(timeout=LOOK_S if self._chunks else None))
        return self._chunks.pop(found)[0]

    def _written(self) -> int | None:
        rooms = set[int]()
        for number, (chunk, event) in enumerate(self._chunks):
            if chunk.room not in rooms and _is_written(event):
                return number
            rooms.add(chunk.room)
        return None


def _is_written(event: Any) -> bool:
    with suppress(Exception):  # the forward failed: SGLang's scheduler ends before a last chunk
        return event is None or is_over(event)
    return True


class EarlySends:
    """Mixed into NIXL's manager. `early`: the event of the chunk that SGLang's scheduler sends."""

    early: Any = None

    @property
    def transfer_queues(self) -> list[ChunkQueue]:
        return self._queues

    @transfer_queues.setter
    def transfer_queues(self, queues: list[Any]) -> None:
        self._queues = [ChunkQueue(self) for _ in queues]  # SGLang starts a worker for each then


def switch_off_early_sends(manager: Any, release: str) -> str:
    """Switch SGLang's early sends off where nobody waits for what they send, and say so. An
    operator's own setting stays."""
    queues = getattr(manager, "transfer_queues", [None])
    waits = manager.backend == "mooncake" and not release.startswith("0.5.21")
    if EARLY_SENDS in os.environ or waits or all(isinstance(one, ChunkQueue) for one in queues):
        return ""
    os.environ[EARLY_SENDS] = "0"
    return f"; {EARLY_SENDS}=0, since SGLang's {manager.backend} does not wait"
