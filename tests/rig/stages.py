"""The stages of a room at which a test may act, and what holds a rank there meanwhile.

opened    decode has sent the OPEN          reading   decode starts the read
packed    prefill has packed a segment      read      it has ended, and is not acknowledged
ready     prefill has sent its READY        copying   decode copies its rows
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from sglang_mixkv.channel.messages import Open, Ready
from sglang_mixkv.decode import events as ev

STAGES = "opened", "packed", "ready", "reading", "read", "copying"
REACHED_S, HELD_S = 30, 20


class Stop:
    """Of all processes of a flow. Without a lock, so that ranks may be killed in it."""

    def __init__(self, context: Any) -> None:
        self._stage, self._held = context.RawValue("b", -1), context.RawValue("b", 0)

    def act(self, stage: str, act: Callable[[], object]) -> None:
        """The test's: once the next room is at that stage, and before it goes on."""
        self._stage.value = STAGES.index(stage)
        deadline = time.monotonic() + REACHED_S
        while not self._held.value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no room was {stage}")
            time.sleep(0.0005)
        try:
            act()
        finally:
            self._held.value = 0

    def at(self, stage: str, is_met: Callable[[], bool] = lambda: True) -> None:
        """A rank's: a room is there. `is_met`: whether it meets the fault."""
        if self._stage.value != STAGES.index(stage) or not is_met():
            return
        self._stage.value, self._held.value = -1, 1
        deadline = time.monotonic() + HELD_S
        while self._held.value and time.monotonic() < deadline:
            time.sleep(0.0005)


def hold_in_prefill(outbox: Any, stop: Stop, is_met: Callable[[int], bool]) -> None:
    """`is_met`: whether a room meets the fault."""
    pack, send = outbox._pack, outbox._send

    def packs(job: Any) -> Any:
        packed, room = pack(job), outbox._rooms._uses.get(job.use)
        stop.at("packed", lambda: room is not None and is_met(room.bootstrap_room))
        return packed

    def sends(action: Any) -> None:
        send(action)
        if isinstance(action.message, Ready):
            stop.at("ready", lambda: is_met(action.message.room))

    outbox._pack, outbox._send = packs, sends


def hold_in_decode(inbox: Any, stop: Stop, is_met: Callable[[bytes], bool]) -> None:
    """`is_met`: whether rooms at a peer meet the fault."""
    peers, fetches, copier = inbox._peers, inbox._fetches, inbox._copier
    send, start, handle, copy = peers.send, fetches.start, inbox._handle, copier._copy

    def sends(peer: bytes, message: Any) -> bool:
        has_left: bool = send(peer, message)
        if isinstance(message, Open):
            stop.at("opened", lambda: is_met(peer))
        return has_left

    def starts(read: ev.StartRead) -> Any:
        stop.at("reading", lambda: is_met(read.peer))
        return start(read)

    def handles(event: Any) -> None:
        if isinstance(event, ev.ReadDone):
            stop.at("read", lambda: is_met(inbox._rooms._reads.get(event.read).peer))
        handle(event)

    def copies(job: Any) -> Any:
        entry = inbox._entries.get(job.generation)
        if isinstance(job, ev.Unpack) and entry is not None:
            sources = {source.heads: source.peer for source in entry.opened.sources}
            stop.at("copying", lambda: is_met(sources[job.heads]))
        return copy(job)

    peers.send, fetches.start, inbox._handle, copier._copy = sends, starts, handles, copies


class Port:
    """Before an outbox's thread asks its events: closes the channel's port, or opens it again."""

    def __init__(self, outbox: Any, is_closed: Callable[[], bool]) -> None:
        self._outbox, self._real, self._is_closed = outbox, outbox._query_events, is_closed
        self._closed = False

    def __call__(self) -> None:
        address = self._outbox.address
        if self._is_closed() and not self._closed:
            self._closed = True
            self._outbox._socket.unbind(address)
            disconnect(int(address.rpartition(":")[2]))
        elif self._closed and not self._is_closed():
            self._closed = False
            self._outbox._socket.bind(address)
        self._real()


def disconnect(port: int) -> None:
    """End all TCP connections of this process from that port of its own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family == socket.AF_INET and one.getsockname()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)
