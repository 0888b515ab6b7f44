"""A prefill rank's channel: the calls of SGLang's scheduler, and the thread that owns the socket.

The scheduler calls `begin`, `add_chunk`, `release` and `end`. The channel thread carries out the
machine's actions, and adds a chunk to the machine once the chunk's forward has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import zmq
from msgspec.structs import replace

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.actions import Note, Send, StartCopies
from sglang_mixkv.channel.loop import Call, Reporter, Worker
from sglang_mixkv.channel.messages import Fail, Open, Ready
from sglang_mixkv.channel.sockets import NOBLOCK, endpoint, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.copier import Copy, HeldBack, Store
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.prefill.actions import Action, PagesReleased
from sglang_mixkv.prefill.machine import Machine
from sglang_mixkv.prefill.transfer import Segment

logger = logging.getLogger(f"sglang.{__name__}")

HeldChunk = tuple["SendHandle", int, int, bool, Pages]  # the arguments of Machine.add_chunk

SNDMORE = int(zmq.SNDMORE)  # an operation on pyzmq's enum is slower
PARTS = 1024  # frames of one message to skip per call; each takes 0.5 us


class SendHandle:
    """One sender's request, shared by the scheduler and the channel. Its pages may be read while
    `gate` is open. `waits`: a chunk had to wait for its forward. `pages_released`: the channel
    packs no more of it. `sent`: when SGLang's own transfer succeeded, recorded by the scheduler,
    since the channel thread may hang."""

    def __init__(self, room: int) -> None:
        self.room, self.gate = room, Gate()
        self.pages_released = False
        self.sent: float | None = None
        self.ended = self.waits = False


class PrefillWorker(Worker[Machine]):
    """A prefill rank's channel. Its socket is bound to `host` and `port` (0: any free one); peers
    read the slots of `store` over its data plane."""

    names = "mixkv-prefill", "mixkv-pack"
    _handle = SendHandle

    def __init__(
        self, machine: Machine, store: Store, times: Times, reporter: Reporter, host: str, port: int
    ) -> None:
        self._context = new_context()
        self._socket = new_socket(self._context, zmq.ROUTER, host, times)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint(host, port))
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]
        super().__init__(machine, reporter, times, store)
        self._poller.register(self._socket)
        self._held = HeldBack[HeldChunk]()  # until their forwards end
        self._lost: set[bytes] = set()
        self._inside = False  # more frames of the last message follow
        self._thread.start()

    # -- the scheduler's thread

    def begin(self, room: int) -> SendHandle:
        handle = self._handle(room)
        self._call(self._machine.begin, handle, room, wake=False)  # the first chunk wakes
        return handle

    def add_chunk(
        self, handle: SendHandle, first: int, count: int, last: bool, pages: Pages
    ) -> None:
        chunk = handle, first, count, last, pages
        if pages.events or handle.waits:  # or an earlier chunk waits
            handle.waits = True
            self._call(self._held.append, (handle.gate, pages, chunk))
        else:
            self._call(self._machine.add_chunk, *chunk)

    def release(self, handle: SendHandle) -> bool:
        """Return whether Success may be reported, after SGLang's own transfer: nothing reads the
        pages any more. The closed gate stops what a request that was given up left queued."""
        if handle.sent is None:
            handle.sent = self._clock()
            if not handle.pages_released:
                self._call(self._machine.target_sent, handle, wake=False)  # only starts a clock
        if not handle.pages_released:
            overdue = self._clock() - handle.sent > self._slowest
            if not (self.broken or overdue):
                return False
            logger.error(
                "[MIXKV-SELF-01] the draft KV of room %s was neither packed nor given up; the "
                "request continues",
                handle.room,
            )
            handle.pages_released = True
        return handle.gate.try_close()

    def end(self, handle: SendHandle, reason: str = "") -> None:
        """End a request: once this returns, nothing reads its pages. Idempotent, since abort,
        failure_exception and clear all end a sender."""
        if not handle.ended:
            handle.gate.close()
            handle.ended = True
            hurry = bool(reason) or not handle.pages_released
            self._call(self._machine.end, handle, reason, wake=hurry)

    # -- the channel thread

    def _must_poll(self) -> bool:
        return bool(self._held)

    def _poll(self, ready: list[Any]) -> Iterator[Call]:
        """If a message has a second frame, return: later calls skip the others, PARTS at a time."""
        for chunk, error in self._held.release() if self._held else ():
            chunk[-1].error = error  # fails its packing, and so its transfers
            yield self._machine.add_chunk, chunk
        if self._socket not in ready:
            return
        for _ in range(PARTS):
            if not self._inside:
                break
            self._inside = self._socket.recv(NOBLOCK, copy=False).more
        else:
            return
        for connection in self._poller.received(self._socket):
            frame = self._socket.recv(NOBLOCK, copy=False)
            self._inside = frame.more
            if frame.more:
                return self._reporter(Note("unreadable", b"", "a message of several frames"))
            try:
                message = messages.decode(frame.bytes)
            except ValueError as error:
                self._reporter(Note("unreadable", b"", str(error)))
                continue
            if isinstance(message, Open):
                self._compare(message)
            yield self._machine.received, (connection.bytes, message)

    def _do(self, action: Action) -> None:
        match action:
            case StartCopies(segments):
                assert self._copies is not None
                self._copies.start(list(map(_copy_of, segments)))
            case Send():
                self._send(action)
            case PagesReleased(SendHandle() as handle):
                handle.pages_released = True
            case Note():
                self._reporter(action)

    def _send(self, action: Send) -> None:
        message = action.message
        if isinstance(message, Ready) and message.last:  # decode compares weights on this one
            message = replace(message, weights=self._reporter.weights())
        frame = messages.encode(message)
        self._poller.used.add(self._socket)
        try:
            self._socket.send(action.peer, NOBLOCK | SNDMORE)
            self._socket.send(frame, NOBLOCK)
        except zmq.ZMQError:  # the peer is gone, or its queue is full
            assert isinstance(action.message, Ready | Fail)
            self._call(self._machine.unsent, action.message)
            if action.peer not in self._lost:  # once for all sends that fail together
                self._lost.add(action.peer)
                self._call(self._machine.connection_lost, action.peer)
                self._call(self._lost.discard, action.peer)
            return
        for pages in action.chunks:
            self._reporter.announced(self._clock() - pages.written)


def _copy_of(segment: Segment) -> Copy:
    chunk, transfer, handle = segment.chunk, segment.transfer, segment.transfer.request.handle
    assert isinstance(handle, SendHandle)
    return Copy(
        "pack", segment, handle.gate, chunk.pages, segment.first - chunk.first, segment.count,
        transfer.wanted, segment.slot, segment.stamp,
    )  # fmt: skip
