"""Notifies decode ranks of a failure, with SGLang's own message, outside the scheduler's thread.

Where a decode rank is gone, or stands still, SGLang's send blocks for 30 s
(CommonKVManager._connect). So each has a thread, which ends with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any


class Notices:
    """`manager`: SGLang's, of a prefill rank. Only the scheduler's thread calls `send`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._queues: dict[Any, SimpleQueue[dict[str, Any]]] = {}

    def send(self, targets: Iterable[Any], **message: Any) -> None:
        for target in targets:
            if target not in self._queues:
                queue = self._queues[target] = SimpleQueue()
                run = threading.Thread(target=self._run, args=(target, queue), daemon=True)
                run.name = "mixkv-notify"
                run.start()
            self._queues[target].put(message)

    def _run(self, target: Any, queue: SimpleQueue[dict[str, Any]]) -> None:
        manager = self._manager
        while True:  # it logs what it cannot send, and raises nothing
            manager.send_kv_status_message(targets=[target], **queue.get())
