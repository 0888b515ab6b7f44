"""A prefill rank's channel: what SGLang's scheduler calls, the thread that owns the socket, copies.

The scheduler calls `begin`, `add_chunk`, `release` and `end`, which put an event on a queue;
`release` also says whether SGLang's Success may be shown. The channel thread feeds the machine,
sends what it says, starts copies and asks the events that chunks wait for.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.copies import DeviceJob
from sglang_mixkv.channel.gate import Gate
from sglang_mixkv.channel.loop import Worker, is_done
from sglang_mixkv.channel.messages import Ack, Fail, Open
from sglang_mixkv.channel.reporter import Reporter
from sglang_mixkv.channel.sockets import Poller, endpoint, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.layout import Pages, SlotCheck
from sglang_mixkv.prefill import events as ev
from sglang_mixkv.prefill.machine import Machine

if TYPE_CHECKING:
    from sglang_mixkv.draft.rows import Store

logger = logging.getLogger(f"sglang.{__name__}")

BATCH = 64  # messages taken between two looks at the queue
NOBLOCK, SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)  # `|` makes an enum at each use
RCVMORE = int(zmq.RCVMORE)


class SendHandle:
    """One sender's request, between the scheduler and the channel. Its pages are read while `gate`
    is open. `settled`: the channel packs no more of it."""

    def __init__(self, room: int) -> None:
        self.room, self.gate = room, Gate()
        self.settled = False
        self.sent: float | None = None  # when SGLang's own transfer had succeeded
        self.ended = False


class PrefillWorker(Worker[ev.Event, ev.Action]):
    """Its socket is bound at `host`, to `port` or, with 0, to any free one; peers read the slots of
    `store` over its data plane."""

    names = "mixkv-prefill", "mixkv-pack"
    tick, undone, moves = ev.Tick(), staticmethod(ev.undone), ev.PackJob
    _machine: Machine
    _store: Store

    def __init__(
        self, machine: Machine, store: Store, times: Times, reporter: Reporter, host: str, port: int
    ) -> None:
        self._context = new_context()
        self._socket = new_socket(self._context, zmq.ROUTER, host, times)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = endpoint(host, self._bind(host, port))
        poller = Poller()
        poller.register(self._socket)
        super().__init__(machine, poller, reporter, times, store)
        self._pending: deque[ev.AddChunk] = deque()
        self._lost: set[ev.Connection] = set()
        self._thread.start()

    def _bind(self, host: str, port: int) -> int:
        if not port:
            return int(self._socket.bind_to_random_port(endpoint(host, 0).rpartition(":")[0]))
        self._socket.bind(endpoint(host, port))
        return port

    # -- the scheduler's thread

    def begin(self, room: int) -> SendHandle:
        handle = SendHandle(room)
        self._inlet.put(ev.Begin(handle, room), wake=False)  # its first chunk does
        return handle

    def add_chunk(
        self, handle: SendHandle, first: int, count: int, last: bool, pages: Pages
    ) -> None:
        self._inlet.put(ev.AddChunk(handle, first, count, last, pages, bool(pages.events)))

    def release(self, handle: SendHandle) -> bool:
        """SGLang's own transfer has succeeded. Whether that may be reported: nothing reads the
        pages any more. A room that settled without one of its readers may have packs queued, or one
        under way."""
        if handle.sent is None:
            handle.sent = time.monotonic()
            if not handle.settled:
                self._inlet.put(ev.TargetSent(handle), wake=False)  # it starts a clock
        if not handle.settled:
            overdue = time.monotonic() - handle.sent > self._slowest
            if not (self.broken or overdue):
                return False
            logger.error(
                "[MIXKV-SELF-01] the draft KV of room %s was neither packed nor given up; its "
                "request goes on", handle.room,
            )  # fmt: skip
            handle.settled = True
        return handle.gate.shut()

    def end(self, handle: SendHandle, reason: str = "") -> None:
        """When this returns, the pages are not read any more. Idempotent: abort, failure_exception
        and clear all end a sender."""
        if not handle.ended:
            handle.ended = True
            handle.gate.close()
            hurry = bool(reason) or not handle.settled
            self._inlet.put(ev.End(handle, reason), wake=hurry)

    # -- the channel thread

    def _outstanding(self) -> bool:
        return bool(self._pending)

    def _look(self, ready: list[Any]) -> Iterator[ev.Event]:
        while self._pending and all(map(is_done, self._pending[0].pages.events)):
            # events are asked in the order of their chunks, which is the stream's
            yield ev.ChunkWritten(self._pending.popleft().use)
        if self._socket in ready:
            yield from self._received()

    def _received(self) -> Iterator[ev.Event]:
        for _ in range(BATCH):
            try:
                connection, frame = self._socket.recv(NOBLOCK), self._socket.recv(NOBLOCK)
                while self._socket.getsockopt(RCVMORE):
                    frame = self._socket.recv(NOBLOCK) and b""  # ours have one
                message = messages.decode(frame)
            except zmq.Again:
                return
            except ValueError as error:
                self._reporter(ev.Note("unreadable", b"", str(error)))
                continue
            if isinstance(message, Open | Ack | Fail):
                yield ev.Received(connection, message)

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.AddChunk) and event.pending:
            self._pending.append(event)
        elif isinstance(event, ev.ConnectionLost):
            self._lost.discard(event.connection)
        self._machine.handle(event, time.monotonic())

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Pack(jobs):
                assert self._copies is not None
                self._copies.start(jobs)
            case ev.Send():
                self._send(action)
            case ev.Settled(SendHandle() as handle):
                handle.settled = True
            case ev.Note():
                self._reporter(action)

    def _send(self, action: ev.Send) -> None:
        frame = messages.encode(action.message)
        self._poller.used(self._socket)
        try:
            self._socket.send(action.connection, NOBLOCK | SNDMORE)
            self._socket.send(frame, NOBLOCK)
        except zmq.ZMQError:  # no route to it any more, or it takes nothing
            self._inlet.put(ev.Unsent(action.message))
            if action.connection not in self._lost:  # once for all answers that it does not take
                self._lost.add(action.connection)
                self._inlet.put(ev.ConnectionLost(action.connection))

    # -- copies

    def _size_of(self, job: ev.PackJob) -> int:
        return job.count * len(job.heads) * self._store.rows.bytes_per_head

    def _run_on_host(self, job: ev.PackJob) -> SlotCheck:
        rows, slot = job.pages.rows(job.offset, job.count), self._store.staging.slot(job.slot)
        self._store.rows.pack(rows, job.heads, slot, job.stamp)
        return SlotCheck.OK

    def _prepare(self, job: ev.PackJob) -> DeviceJob:
        assert isinstance(job.handle, SendHandle)
        device, gate = self._store.device, job.handle.gate
        pages = job.pages.on(device)
        what = device.job(pages, job.offset, job.count, job.heads, job.slot, job.stamp)
        return DeviceJob(gate, device.start_pack, what)

    def _event_of(self, jobs: Sequence[ev.PackJob], found: Any) -> ev.Packed:
        error = "" if found is None or found == SlotCheck.OK else repr(found)[:300]
        return ev.Packed(tuple([job.job for job in jobs]), error, closed=found is None)
