"""Notifies decode ranks of an abort on prefill, by SGLang's own message for failures, which its
abort() does not send: decode would wait for SGLANG_DISAGGREGATION_WAITING_TIMEOUT, 300 s.

Where a decode rank is gone, or stands still, SGLang's send blocks for 30 s
(CommonKVManager._connect). So each has a thread, until it had nothing to send for IDLE_S: a decode
rank that starts again has another port. One more looks for decode ranks whose metadata come after
the abort.
"""

from __future__ import annotations

import logging
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.engine.rooms import newest
from sglang_mixkv.series import ABORTED

if TYPE_CHECKING:
    from sglang_mixkv.engine.sender import DraftSender

logger = logging.getLogger(f"sglang.{__name__}")

LOOK_S, IDLE_S = 0.2, 60.0
LATE_S = 300.0  # SGLang's timeout, beyond which decode waits no more
MAX_LATE = 4096


class Notices:
    """`manager`: SGLang's, of a prefill rank. Only its scheduler's thread calls `aborted`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._queues: dict[Any, SimpleQueue[int]] = {}
        self._late: SimpleQueue[tuple[float, DraftSender]] | None = None

    def aborted(self, sender: DraftSender) -> None:
        """A room that SGLang has concluded is left alone. After Success decode goes on with the
        request. After Failed decode was notified, or must not be, since NIXL could not say that its
        writes have ended (transfer_worker in nixl/conn.py)."""
        manager, room = self._manager, sender.bootstrap_room
        status = manager.request_status.get(room)
        if status in (None, KVPoll.Success, KVPoll.Failed):
            return
        if not manager.enable_deferred_decode_kv_release or self._send(room):
            return
        if self._late is None:
            self._late = SimpleQueue()
            self._start(self._look, self._late)
        if self._late.qsize() < MAX_LATE:
            self._late.put((time.monotonic() + LATE_S, sender))

    def _send(self, room: int) -> bool:
        """To the decode ranks that wait for KV of this rank. Whether metadata of any have come."""
        infos = list(self._manager.transfer_infos.get(room, {}).values())
        for target in {(one.endpoint, one.dst_port) for one in infos if not one.is_dummy}:
            with self._lock:
                if target not in self._queues:
                    self._queues[target] = SimpleQueue()
                    self._start(self._run, target, self._queues[target])
                self._queues[target].put(room)
        return bool(infos)

    def _start(self, run: Any, *args: Any) -> None:
        threading.Thread(target=run, args=args, name="mixkv-notify", daemon=True).start()

    def _run(self, target: Any, rooms: SimpleQueue[int]) -> None:
        while True:
            try:
                room = rooms.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if rooms.empty():
                        del self._queues[target]
                        return
                continue
            self._manager.send_kv_status_message(  # logs what it cannot send, and raises nothing
                targets=[target], bootstrap_room=room, status=KVPoll.Failed, failure_reason=ABORTED
            )

    def _look(self, late: SimpleQueue[tuple[float, DraftSender]]) -> None:
        while True:
            waiting = [late.get(), *(late.get() for _ in range(late.qsize()))]
            for until, sender in waiting:
                try:
                    if time.monotonic() < until and not self._has_come(sender):
                        late.put((until, sender))
                except Exception:
                    logger.exception(
                        "[MIXKV-SELF-01] decode is not notified of an abort, and waits"
                    )
            time.sleep(LOOK_S)

    def _has_come(self, sender: DraftSender) -> bool:
        """Whether nothing is left to do. SGLang's thread (bootstrap_thread) notes the prefix, and
        then the status, once all decode ranks have come: the room's tables are cleared then. Where
        its scheduler has not cleared the sender, that asks for the status again and clears it: a
        status that is gone would be WaitingForInput (NixlKVManager.check_status up to 0.5.22)."""
        tables, room = self._manager, sender.bootstrap_room
        if newest(room) not in (None, sender):  # the number is another request's
            return True
        if room not in tables.req_to_decode_prefix_len or room not in tables.request_status:
            return False
        self._send(room)
        if newest(room) is None:
            sender.clear()
        else:
            tables.req_to_decode_prefix_len.pop(room, None)
            tables.transfer_infos.pop(room, None)
        return True
