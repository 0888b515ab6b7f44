"""SGLang's own messages that end the other side's half of a request, where SGLang sends none.

    prefill aborts    decode would wait for SGLANG_DISAGGREGATION_WAITING_TIMEOUT, 300 s
    decode refuses    prefill would hold the request for SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT,
                      300 s, and a router that waits for both halves its client

SGLang's sends block for up to 30 s where the other side is gone, or stands still: threads send.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base.conn import KVPoll

from sglang_mixkv.engine.background import Background
from sglang_mixkv.engine.prefill_http import Ranks, ranks_of
from sglang_mixkv.engine.rooms import newest
from sglang_mixkv.series import ABORTED

if TYPE_CHECKING:
    from sglang_mixkv.engine.sender import DraftSender

logger = logging.getLogger(f"sglang.{__name__}")

BLOCKED_AT_ONCE = 256  # decode ranks
LOOK_S, LATE_S = 1.0, 300.0  # SGLang's timeout, beyond which decode waits no more
SENT_AFTER_S = (0.2, 0.7, 2.0, 8.0)  # behind decode's own answer, which has the reason
RANKS_S = 10.0  # the ranks of a refused server are asked for anew after that
LINGER_MS = 1000  # for what was just sent


class AbortedRequests:
    """Notifies decode of an abort on prefill. `manager`: SGLang's, of a prefill rank."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._background = Background("mixkv-notify", BLOCKED_AT_ONCE)
        self._sending: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()

    def add(self, sender: DraftSender) -> None:
        """A room that SGLang has concluded is left alone. After Success decode goes on with the
        request. After Failed decode was notified, or must not be, since NIXL could not say that its
        writes have ended (transfer_worker in nixl/conn.py)."""
        room, manager = sender.bootstrap_room, self._manager
        ended = manager.request_status.get(room) in (None, KVPoll.Success, KVPoll.Failed)
        if manager.enable_deferred_decode_kv_release and not ended:
            self._background.run_unwatched(self._notify(sender, room, self._targets(room)))

    def _targets(self, room: int) -> Any:
        """The decode ranks that wait for KV of this rank; None before metadata of any have come."""
        infos = list(self._manager.transfer_infos.get(room, {}).values())
        return (
            {(one.endpoint, one.dst_port) for one in infos if not one.is_dummy} if infos else None
        )

    async def _notify(self, sender: DraftSender, room: int, targets: Any) -> None:
        until = time.monotonic() + LATE_S
        while targets is None and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            targets = self._late(sender, room)
        await asyncio.gather(*(self._send(target, room) for target in targets or ()))

    async def _send(self, target: Any, room: int) -> None:
        """One at a time to each target, so that one that is gone takes one thread."""
        async with self._sending.setdefault(target, asyncio.Lock()):
            await asyncio.to_thread(  # logs what it cannot send, and raises nothing
                self._manager.send_kv_status_message,
                targets=[target], bootstrap_room=room, status=KVPoll.Failed, failure_reason=ABORTED,
            )  # fmt: skip

    def _late(self, sender: DraftSender, room: int) -> Any:
        """The targets of a room that was aborted before they came; () where nothing is left to do.
        SGLang's thread (bootstrap_thread) notes the prefix, and then the status, once all decode
        ranks have come: the room's tables are cleared then. Where its scheduler has not cleared the
        sender, that asks for the status again and clears it: a status that is gone would be
        WaitingForInput (NixlKVManager.check_status up to 0.5.22)."""
        tables = self._manager
        if newest(room) not in (None, sender):  # the number is another request's
            return ()
        if room not in tables.req_to_decode_prefix_len or room not in tables.request_status:
            return None
        targets = self._targets(room) or ()
        if newest(room) is None:
            sender.clear()
        else:
            tables.req_to_decode_prefix_len.pop(room, None)
            tables.transfer_infos.pop(room, None)
        return targets


class RefusedRequests:
    """Sends SGLang's own ABORT to the ranks of a refused server, which is all that they get. One
    that comes before the request is ignored (mooncake/conn.py _handle_abort_notification): it is
    sent again. Releases up to 0.5.15 do not all know ABORT, and a thread of theirs would end: they
    get none."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._ranks: dict[str, asyncio.Task[Ranks]] = {}
        self._sending, self._under_way = asyncio.Lock(), 0
        self._class: Any = None

    def add(self, address: str, receiver: Any) -> None:
        """`receiver`: of SGLang, which has failed; its copy sends the messages."""
        self._background.run_unwatched(self._notify(address, copy.copy(receiver)))

    async def _notify(self, address: str, receiver: Any) -> None:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        self._under_way += 1
        try:
            if address not in self._ranks:
                self._ranks[address] = loop.create_task(_ask(address))
                loop.call_later(RANKS_S, self._ranks.pop, address)
            ranks = await self._ranks[address]
            for after in SENT_AFTER_S if ranks else ():
                await asyncio.sleep(began + after - time.monotonic())
                receiver.__class__ = self._with_own_sockets(receiver)
                receiver.bootstrap_infos, receiver.abort_notified = ranks, False
                async with self._sending:  # so that hostile ranks block one thread
                    await asyncio.to_thread(receiver.ensure_abort_notified)
        finally:
            self._under_way -= 1
            self._hang_up()

    def _with_own_sockets(self, receiver: Any) -> Any:
        """SGLang's receivers share a socket for each endpoint, for good. A refused server's are
        closed here when nothing is left to send, and it may have named another server's ranks."""
        if self._class is None:
            own: dict[str, Any] = {"_socket_cache": {}, "_socket_locks": {}}
            self._class = type("RefusedReceiver", (type(receiver),), own)
        return self._class

    def _hang_up(self) -> None:
        if self._class is not None and not self._under_way:
            for socket in self._class._socket_cache.values():
                socket.close(linger=LINGER_MS)
            self._class = None


async def _ask(address: str) -> Ranks:
    try:
        return await ranks_of(address)
    except Exception as error:
        logger.warning(
            "[MIXKV-MSG-02] sglang-mixkv: prefill server %s is refused, its ranks are not known: "
            "it may hold requests until its bootstrap timeout: %r", address, error,
        )  # fmt: skip
        return []
