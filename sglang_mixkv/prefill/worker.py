"""A prefill rank's channel: what SGLang's scheduler calls, the thread that owns the socket, copies.

The scheduler calls `begin`, `add_chunk`, `target_sent` and `end`, which put an event on a queue,
and asks `SendHandle.release`. The channel thread feeds the machine, sends what it says, starts
copies and asks the events that chunks wait for.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.copies import DeviceCopies, DeviceJob, HostCopies
from sglang_mixkv.channel.data_plane import DataPlane
from sglang_mixkv.channel.gate import Gate
from sglang_mixkv.channel.loop import Worker, is_done
from sglang_mixkv.channel.messages import Ack, Fail, Open
from sglang_mixkv.channel.reporter import Reporter
from sglang_mixkv.channel.sockets import Poller, endpoint, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.slot_format import SlotCheck
from sglang_mixkv.prefill import events as ev
from sglang_mixkv.prefill.machine import Machine

if TYPE_CHECKING:
    from sglang_mixkv.draft.rows import DraftRows, Staging

logger = logging.getLogger(f"sglang.{__name__}")

BATCH = 64  # messages taken between two looks at the queue
DRAIN = 2.0  # a rank that stops waits so long for slots that nobody has read


class Pages:
    """Where a chunk's tokens are: `pages` of `page_size` tokens, in the draft pool's numbers.

    `events`: things with `query() -> bool`. Once all are true, the pages can be read and the KV is
    in them.
    """

    def __init__(self, pages: Any, page_size: int, events: Sequence[Any] = ()) -> None:
        self._pages, self._size, self.events = pages, page_size, events
        self._on_device: Any = None

    def rows(self, offset: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row numbers of `count` tokens, `offset` tokens behind the first page's start."""
        tokens = np.arange(offset, offset + count)
        pages = np.asarray(self._pages, dtype=np.int64)
        return pages[tokens // self._size] * self._size + tokens % self._size

    def on(self, device: Any) -> Any:
        """The page numbers there, uploaded once for all segments of the chunk."""
        if self._on_device is None:
            self._on_device = device.pages(self._pages)
        return self._on_device


class SendHandle:
    """One sender's request, between the scheduler and the channel. Its pages are read while `gate`
    is open. `settled`, `opened`: the channel's word; `bytes`: of draft KV that were packed."""

    def __init__(self, room: int) -> None:
        self.room, self.gate = room, Gate()
        self.settled, self.opened = False, tuple[Open, ...]()
        self.bytes = 0
        self.sent: float | None = None  # when SGLang's own transfer had succeeded
        self.ended = False


class PrefillWorker(Worker[ev.Event, ev.Action]):
    """`plane`: peers read the staging memory through it. `device`: GpuRows of this pool and this
    staging memory, or None where a thread copies."""

    name, tick, failed = "mixkv-prefill", ev.Tick(), ev.ActionFailed

    def __init__(
        self,
        machine: Machine,
        rows: DraftRows,
        staging: Staging,
        plane: DataPlane,
        host: str,
        port: int,
        times: Times,
        reporter: Reporter,
        device: Any = None,
    ) -> None:
        self._slots, self._rows, self._staging, self._plane = machine.slots, rows, staging, plane
        self._context = new_context()
        self._socket = new_socket(self._context, zmq.ROUTER, host, times)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = endpoint(host, self._bind(host, port))
        self._poller = Poller()
        self._poller.register(self._socket)
        super().__init__(machine, self._poller, reporter, 2 * times.whole_wait)
        self._pending: deque[ev.AddChunk] = deque()
        self._lost: set[ev.Connection] = set()
        self._device = device
        self._copies = (
            HostCopies("mixkv-pack", self._pack, self._size_of, self._inlet.wake, rows.use_device)
            if device is None
            else DeviceCopies(device, self._on_device, self._packed)
        )
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

    def close(self) -> None:
        """Serve the slots that are offered, for a moment, and end the threads."""
        deadline = time.monotonic() + DRAIN
        while self._slots.offered and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stop()
        self._plane.close()
        self._poller.close()
        self._context.destroy(linger=0)
        self._inlet.close()

    # -- the channel thread

    def _begin(self) -> None:
        self._rows.use_device()

    def _outstanding(self) -> bool:
        return bool(self._pending)

    def _look(self, ready: list[Any]) -> Iterator[ev.Event]:
        while self._pending and all(map(is_done, self._pending[0].pages.events)):
            # events are asked in the order of their chunks, which is the stream's
            yield ev.ChunkWritten(self._pending.popleft().use)
        if self._socket in ready:
            yield from self._received()

    def _copied(self) -> Iterator[ev.Packed]:
        assert self._copies is not None
        for job, (error, closed) in self._copies.ended():
            yield ev.Packed(job.job, error, closed)

    def _received(self) -> Iterator[ev.Event]:
        for _ in range(BATCH):
            try:
                connection, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                message = messages.decode(frames[0] if len(frames) == 1 else b"")
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
        super()._handle(event)

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Pack(jobs):
                assert self._copies is not None
                self._copies.start(jobs)
            case ev.Send():
                self._send(action)
            case ev.Settled(SendHandle() as handle, opened):
                handle.opened, handle.settled = opened, True
            case ev.Note():
                self._reporter(action)

    def _send(self, action: ev.Send) -> None:
        frames = [action.connection, messages.encode(action.message)]
        self._poller.used(self._socket)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # no route to it any more, or it takes nothing
            if action.connection not in self._lost:  # once for all answers that it does not take
                self._lost.add(action.connection)
                self._inlet.put(ev.ConnectionLost(action.connection))

    # -- copies

    def _size_of(self, job: ev.PackJob) -> int:
        return job.count * self._rows.bytes_per_token(len(job.heads))

    def _pack(self, job: ev.PackJob) -> tuple[str, bool]:
        """Fill a slot. An error, and whether the gate was closed."""
        handle = job.use
        assert isinstance(handle, SendHandle)
        if not handle.gate.enter():
            return "", True
        try:
            rows, slot = job.pages.rows(job.offset, job.count), self._staging.slot(job.slot)
            started = time.perf_counter()
            size = self._rows.pack(rows, job.heads, slot, job.stamp)
            self._reporter.moved(size, time.perf_counter() - started)
            handle.bytes += size
        except Exception as error:
            logger.exception("[MIXKV-SELF-01] draft KV could not be packed")
            return repr(error)[:300], False
        finally:
            handle.gate.leave()
        return "", False

    def _on_device(self, job: ev.PackJob) -> DeviceJob:
        handle = job.use
        assert isinstance(handle, SendHandle)
        pages = job.pages.on(self._device)
        what = self._device.job(pages, job.offset, job.count, job.heads, job.slot, job.stamp)
        return DeviceJob(handle.gate, "pack", what)

    def _packed(self, job: ev.PackJob, found: Any, seconds: float) -> tuple[str, bool]:
        if found is None:
            return "", True
        if found != SlotCheck.OK:
            return repr(found)[:300], False
        assert isinstance(job.use, SendHandle)
        size = self._size_of(job)
        self._reporter.moved(size, seconds)
        job.use.bytes += size
        return "", False
