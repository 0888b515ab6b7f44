"""A prefill rank's threads: one owns the socket and the state machine, one packs.

SGLang's scheduler calls `begin`, `add_chunk`, `target_sent` and `end`, which put an event on a
queue, and reads `Use.settled`. The channel thread feeds the machine, sends what it says, and asks
the events that chunks wait for. The packing thread copies rows into slots. Neither decides
anything, neither raises; if one of them could not go on, every use counts as settled.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.data_plane import DataPlane
from sglang_mixkv.channel.gate import Gate
from sglang_mixkv.channel.messages import Ack, Fail, Open
from sglang_mixkv.channel.notes import Notes
from sglang_mixkv.channel.sockets import Inlet, Looks, endpoint, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.prefill import events as ev
from sglang_mixkv.prefill.rooms import Rooms

if TYPE_CHECKING:
    from sglang_mixkv.draft.rows import DraftRows, Staging

logger = logging.getLogger(f"sglang.{__name__}")

BATCH = 64  # messages taken between two looks at the queue
TICK = 0.1  # seconds
DRAIN = 2.0  # a rank that stops waits so long for slots that nobody has read


class Pages:
    """Where a chunk's tokens are: `pages` of `page_size` tokens, in the draft pool's numbers.

    `events`: things with `query() -> bool`. Once all are true, the pages can be read and the KV is
    in them.
    """

    def __init__(self, pages: Any, page_size: int, events: Sequence[Any] = ()) -> None:
        self._pages, self._size, self.events = pages, page_size, events

    def rows(self, offset: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row numbers of `count` tokens, `offset` tokens behind the first page's start."""
        tokens = np.arange(offset, offset + count)
        pages = np.asarray(self._pages, dtype=np.int64)
        return pages[tokens // self._size] * self._size + tokens % self._size


class Use:
    """One sender's request, as the scheduler's thread sees it. `opened`: once it is settled. Its
    pages are read while `gate` is open."""

    def __init__(self, number: int, broken: threading.Event) -> None:
        self.number, self.gate = number, Gate()
        self._settled, self._broken = False, broken
        self.bytes = 0
        self.sent = self.ended = False
        self.opened: tuple[Open, ...] = ()

    @property
    def settled(self) -> bool:
        return self._settled or self._broken.is_set()

    def release(self) -> bool:
        """Whether SGLang's Success may be reported: nothing reads the pages, or will. A room that
        settled without one of its readers may have packs queued, or one under way."""
        return self.settled and self.gate.shut()


class Outbox:
    """`plane`: peers read the staging memory through it. `notes`: see channel/notes.py."""

    def __init__(
        self,
        rooms: Rooms,
        rows: DraftRows,
        staging: Staging,
        plane: DataPlane,
        host: str,
        port: int,
        times: Times,
        notes: Notes,
    ) -> None:
        self._rooms, self._rows, self._staging, self._plane = rooms, rows, staging, plane
        self._notes = notes
        self._context = new_context()
        self._socket = new_socket(self._context, zmq.ROUTER, host, times)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = self._bind(host, port)
        self.address = endpoint(host, port)
        self._inlet: Inlet[ev.Event] = Inlet()
        self._work: queue.SimpleQueue[ev.Pack | None] = queue.SimpleQueue()
        self._pending: deque[ev.AddChunk] = deque()
        self._lost: set[ev.Connection] = set()
        self._uses: dict[int, Use] = {}
        self._numbers = itertools.count(1)
        self._broken, self._stopping = threading.Event(), False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run, "mixkv-outbox"), (self._pack_all, "mixkv-pack"))
        ]
        for thread in self._threads:
            thread.start()

    def _bind(self, host: str, port: int) -> int:
        if not port:
            return int(self._socket.bind_to_random_port(endpoint(host, 0).rpartition(":")[0]))
        self._socket.bind(endpoint(host, port))
        return port

    # -- the scheduler's thread

    def begin(self, room: int) -> Use:
        use = Use(next(self._numbers), self._broken)
        self._uses[use.number] = use
        self._inlet.put(ev.Begin(use.number, room), wake=False)  # its first chunk does
        return use

    def add_chunk(self, use: Use, first: int, count: int, last: bool, pages: Pages) -> None:
        pending = bool(pages.events)
        self._inlet.put(ev.AddChunk(use.number, first, count, last, pages, pending))

    def target_sent(self, use: Use) -> None:
        """A use that is settled waits for nothing any more."""
        if not use.sent:
            use.sent = True
            if not use.settled:
                self._inlet.put(ev.TargetSent(use.number), wake=False)  # it starts a clock

    def end(self, use: Use, reason: str = "") -> None:
        """When this returns, the use's pages are not read any more. Idempotent: abort,
        failure_exception and clear all end a sender."""
        if not use.ended:
            use.ended = True
            use.gate.close()
            self._uses.pop(use.number, None)
            hurry = bool(reason) or not use.settled
            self._inlet.put(ev.End(use.number, reason), wake=hurry)

    def left(self) -> dict[str, int]:
        return self._rooms.left()

    def check(self) -> list[str]:
        """For an idle rank."""
        found = [f"thread {t.name} has ended" for t in self._threads if not t.is_alive()]
        left = {k: v for k, v in self.left().items() if k != "offered"}
        return found + [f"{count} {name} left" for name, count in left.items()]

    def close(self) -> None:
        """Serve the slots that are offered, for a moment, and end the threads."""
        deadline = time.monotonic() + DRAIN
        while self._rooms.slots.offered and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping = True
        self._inlet.wake()
        self._work.put(None)
        for thread in self._threads:
            thread.join(2)
        self._plane.close()
        self._context.destroy(linger=0)
        self._inlet.close()

    # -- the channel thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inlet.fileno(), zmq.POLLIN)
        looks, ticked = Looks(poller, TICK), 0.0
        try:
            while not self._stopping:
                ready = looks.wait(bool(self._pending))
                for event in self._inlet.take(self._inlet.fileno() in ready):
                    if isinstance(event, ev.AddChunk) and event.pending:
                        self._pending.append(event)
                    if isinstance(event, ev.ConnectionLost):
                        self._lost.discard(event.connection)
                    self._handle(event)
                self._query_events()
                if self._socket in ready:
                    self._receive()
                if time.monotonic() - ticked >= TICK:
                    ticked = time.monotonic()
                    self._handle(ev.Tick())
                    self._notes.ticked()
        except Exception:
            logger.exception("[MIXKV-SELF-01] the draft channel of this rank ends")
        finally:
            self._broken.set()

    def _query_events(self) -> None:
        """Events are asked in the order of their chunks, which is the stream's."""
        while self._pending and all(map(_done, self._pending[0].pages.events)):
            self._handle(ev.ChunkWritten(self._pending.popleft().use))

    def _receive(self) -> None:
        for _ in range(BATCH):
            try:
                connection, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                message = messages.decode(frames[0] if len(frames) == 1 else b"")
            except zmq.Again:
                return
            except ValueError as error:
                self._notes(ev.Note("unreadable", b"", str(error)))
                continue
            if isinstance(message, Open | Ack | Fail):
                self._handle(ev.Received(connection, message))

    def _handle(self, event: ev.Event) -> None:
        try:
            for action in self._rooms.handle(event, time.monotonic()):
                self._do(action)
        except Exception:
            logger.exception("[MIXKV-SELF-01] the draft channel failed over %r", type(event))

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Pack():
                self._work.put(action)
            case ev.Send():
                self._send(action)
            case ev.Settled():
                use = self._uses.get(action.use)
                if use is not None:
                    use.opened = self._rooms.opened(action.use)
                    use._settled = True
                self._notes.publish()
            case ev.Note():
                self._notes(action)

    def _send(self, action: ev.Send) -> None:
        frames = [action.connection, messages.encode(action.message)]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # no route to it any more, or it takes nothing
            if action.connection not in self._lost:  # once for all answers that it does not take
                self._lost.add(action.connection)
                self._inlet.put(ev.ConnectionLost(action.connection))

    # -- the packing thread

    def _pack_all(self) -> None:
        while (job := self._work.get()) is not None:
            self._inlet.put(self._pack(job))

    def _pack(self, job: ev.Pack) -> ev.Packed:
        use = self._uses.get(job.use)
        if use is None or not use.gate.enter():
            return ev.Packed(job.job, closed=True)
        try:
            slot = self._staging.slot(job.slot)
            rows = job.pages.rows(job.offset, job.count)
            started = time.perf_counter()
            size = self._rows.pack(rows, job.heads, slot, job.stamp)
            seconds = time.perf_counter() - started
            self._notes.moved(size, seconds)
            use.bytes += size
            if not job.checksum:
                return ev.Packed(job.job)
            return ev.Packed(job.job, self._rows.checksum(slot))
        except Exception as error:
            logger.exception("[MIXKV-SELF-01] draft KV could not be packed")
            return ev.Packed(job.job, error=repr(error)[:300])
        finally:
            use.gate.leave()


def _done(event: Any) -> bool:
    try:
        return bool(event.query())
    except Exception:  # a CUDA error: packing will meet it as well
        return True
