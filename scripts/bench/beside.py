"""What is left of a busy thread's speed while the channel's threads poll beside it.

The channel thread looks every 0.2 ms at events of a GPU's stream and at reads that are not done. It
shares the GIL with SGLang's scheduler, here a thread that counts: `python` never leaves Python, so
that others get the GIL every 5 ms; `torch` calls small operations, each of which lets go of it. A
turn measures its speed with nothing to poll and with something, one after the other.

    outbox, an event    a chunk whose forward has not ended
    inbox, an event     a room whose pages an earlier forward may still write
    inbox, reads        from a rank in a process that is stopped
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq
from common import Record, alone
from reads import plane_of, serve
from sglang_mixkv.decode.copier import Entry
from sglang_mixkv.decode.inbox import Inbox, Store
from sglang_mixkv.prefill.outbox import Outbox, Pages

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.data_plane import DataPlane, Memory
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode import rooms as decode_rooms
from sglang_mixkv.draft.facts import StagingFacts
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.prefill import rooms as prefill_rooms

HOST = "127.0.0.1"
TIMES = Times(100)  # nothing here is late
SLOTS, SLOT, TOKENS, HEAD = 32, 1 << 20, 256, 256
READS = (1, 8)
TURNS, WINDOW_S, SETTLE_S = 15, 0.25, 0.05
BACKENDS = ("mooncake", "nixl")

Pending = AbstractContextManager[None]


class Late:
    """An event of a stream."""

    done = False

    def query(self) -> bool:
        return self.done


class Silent:
    """Notes that nobody reads."""

    def __call__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return self


def wait_until(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not what():
        if time.monotonic() > until:
            raise TimeoutError("the channel's threads do not come to rest")
        time.sleep(1e-3)


def stop(pid: int) -> None:
    """All threads of a process; the others go on until the one that was picked has seen it."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(
        lambda: all(s.read_text().rpartition(") ")[2][0] == "T" for s in tasks.glob("*/stat"))
    )


# ---------------------------------------------------------------- the busy thread


def python(until: float) -> int:
    turns = 0
    while time.perf_counter() < until:
        turns += 1
    return turns


def with_torch(until: float) -> int:
    turns, statuses = 0, torch.zeros(8, dtype=torch.int64)
    while time.perf_counter() < until:
        statuses.fill_(1)
        turns += 1
    return turns


BUSY = {"python": python, "torch": with_torch}


def left(pending: Callable[[], Pending], turns: int) -> dict[str, tuple[float, float, float]]:
    """By busy thread: the median share of its speed, and its quartiles."""
    found: dict[str, list[float]] = {name: [] for name in BUSY}
    for turn in range(turns + 1):
        for name, busy in BUSY.items():
            alone = busy(time.perf_counter() + WINDOW_S)
            with pending():
                time.sleep(SETTLE_S)
                beside = busy(time.perf_counter() + WINDOW_S)
            if turn:  # the first one warms up
                found[name].append(beside / alone)
    return {name: tuple(np.percentile(r, [50, 25, 75]).tolist()) for name, r in found.items()}


# ---------------------------------------------------------------- what the channel waits for


def rows_and_staging() -> tuple[DraftRows, Staging]:
    entries = [torch.zeros((4 * TOKENS, 1, HEAD), dtype=torch.uint8) for _ in range(2)]
    return DraftRows(entries, range(1)), Staging(SLOTS, SLOT, torch.device("cpu"))


@contextmanager
def an_outbox() -> Iterator[Callable[[], Pending]]:
    rows, staging = rows_and_staging()
    rooms = prefill_rooms.Rooms(
        messages.draw_instance(), range(1), lambda *_: TOKENS, SlotPool(SLOTS, TIMES), TIMES
    )
    plane: Any = SimpleNamespace(close=lambda: None)
    outbox = Outbox(rooms, rows, staging, plane, HOST, 0, TIMES, Silent())

    @contextmanager
    def pending() -> Iterator[None]:
        event, use = Late(), outbox.begin(1)
        outbox.add_chunk(use, 0, TOKENS, True, Pages(np.arange(1), TOKENS, [event]))
        yield
        event.done = True
        outbox.end(use)
        wait_until(lambda: not outbox.left())

    try:
        yield pending
    finally:
        outbox.close()


def an_inbox(store: Store) -> Inbox:
    slots, instance = SlotPool(SLOTS, TIMES), messages.draw_instance()
    rooms = decode_rooms.Rooms(instance, slots, SLOT, TIMES)
    return Inbox(rooms, store, TIMES, Silent(), lambda peer: None)


def a_plane(backend: str, staging: Staging) -> DataPlane:
    plane = plane_of(backend)
    plane.register(Memory(staging.address, staging.size), staging.address + 8)
    return plane


def an_entry(inbox: Inbox, sources: tuple[ev.Source, ...], event: Late | None) -> Entry:
    generation = inbox.new_generation()
    opened = ev.OpenRoom(generation, 1, sources, 0, TOKENS, pending=event is not None)
    return Entry(opened, np.arange(1), TOKENS, event)


@contextmanager
def an_inbox_with_an_event() -> Iterator[Callable[[], Pending]]:
    rows, staging = rows_and_staging()
    inbox = an_inbox(Store(rows, staging, a_plane("mooncake", staging)))

    @contextmanager
    def pending() -> Iterator[None]:
        event = Late()
        entry = an_entry(inbox, (), event)
        inbox.open(entry)
        yield
        event.done = True
        inbox.close(entry, "over")
        wait_until(lambda: not inbox.left())

    try:
        yield pending
    finally:
        inbox.shut()


@contextmanager
def an_inbox_with_reads(backend: str, reads: int) -> Iterator[Callable[[], Pending]]:
    """A prefill rank whose socket is here, and whose memory is another process's."""
    if backend == "nixl":
        os.environ["UCX_TLS"] = "tcp"  # or a stopped process's memory is read without it
    rows, staging = rows_and_staging()
    ours, theirs = mp.get_context("fork").Pipe()
    there = mp.get_context("fork").Process(
        target=serve, args=(theirs, backend, SLOTS * SLOT), daemon=True
    )
    there.start()
    plane_endpoint, _, base = ours.recv()
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port(f"tcp://{HOST}")
    facts = StagingFacts(backend, plane_endpoint, base, SLOT, SLOTS)
    row: Any = SimpleNamespace(  # what is looked at of a draft.facts.Row
        instance=messages.draw_instance(), address=f"tcp://{HOST}:{port}", staging=facts
    )
    inbox = an_inbox(Store(rows, staging, a_plane(backend, staging)))
    inbox.add(inbox.dial(row))
    source = ev.Source(row.instance, range(1), 1, SLOTS, TOKENS)

    def announce() -> None:
        """Answer an OPEN: the segment is in a slot. What comes before it is of the last request."""
        message: Any = None
        while not isinstance(message, messages.Open):
            assert socket.poll(10_000)
            connection, frame = socket.recv_multipart()
            message = messages.decode(frame)
        ready = messages.Ready(
            message.room, message.generation, 0, 0, messages.draw(), 0, TOKENS, True
        )
        socket.send_multipart([connection, messages.encode(ready)])

    @contextmanager
    def pending() -> Iterator[None]:
        stop(there.pid)
        entries = [an_entry(inbox, (source,), None) for _ in range(reads)]
        for entry in entries:
            inbox.open(entry)
            announce()
        wait_until(lambda: inbox.left().get("reads", 0) == reads)
        yield
        still = inbox.left().get("reads", 0)
        os.kill(there.pid, signal.SIGCONT)
        for entry in entries:
            inbox.close(entry, "over")
        wait_until(lambda: not inbox.left())
        if still != reads:
            raise RuntimeError(f"{reads - still} reads of a stopped process ended")

    try:
        yield pending
    finally:
        os.kill(there.pid, signal.SIGCONT)
        inbox.shut()
        there.kill()
        there.join()
        socket.close(0)


# ---------------------------------------------------------------- records


def _case(make: Callable[..., Any], args: tuple[Any, ...], turns: int) -> Any:
    with make(*args) as pending:
        return left(pending, turns)


def measure(quick: bool) -> list[Record]:
    """A record for each thing to wait for and each busy thread."""
    cases: list[tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = [
        ("outbox, an event", "-", an_outbox, ()),
        ("inbox, an event", "-", an_inbox_with_an_event, ()),
    ]
    for backend in BACKENDS:
        for reads in READS[:1] if quick else READS:
            name = f"inbox, {reads} read" + "s" * (reads > 1)
            cases.append((name, backend, an_inbox_with_reads, (backend, reads)))
    records = []
    for name, backend, make, args in cases:
        print("beside", name, backend, file=sys.stderr)
        for thread, (share, low, high) in alone(_case, make, args, 1 if quick else TURNS).items():
            records.append(
                {"while": name, "backend": backend, "thread": thread, "left": share,
                 "left_q1": low, "left_q3": high}
            )  # fmt: skip
    return records
