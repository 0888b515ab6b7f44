"""Both sides of the draft channel in one process, without SGLang. Threads, sockets, slots and
copies are real; reads are memory copies that a test can hold or fail.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from rig.channel.invariants import left

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.data_plane import DataPlane, Extent, Memory, Read, RemoteMemory
from sglang_mixkv.channel.handshake import StagingFacts
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import machine as decode_machine
from sglang_mixkv.decode.transfer import Source
from sglang_mixkv.decode.worker import DecodeWorker, ReceiveHandle
from sglang_mixkv.draft.copier import GpuCopier, HostCopier, Store
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.slot_format import SLOT_OVERHEAD
from sglang_mixkv.prefill import machine as prefill_machine
from sglang_mixkv.prefill.worker import PrefillWorker, SendHandle

HOST, HEADS, PAGE, PAGES = "127.0.0.1", range(4), 4, 32
TOKEN_BYTES = 2 * len(HEADS) * 16  # K and V of one layer
SLOTS = 8  # on prefill; decode has more
SLOT_BYTES = 1024  # on decode; prefill's are larger
SEGMENT = (SLOT_BYTES - SLOT_OVERHEAD) // TOKEN_BYTES  # tokens
CANARY = 0xA5
SOON_S = 20.0  # limit of operations that take milliseconds on an idle machine


def wait_for(what: Callable[[], Any], seconds: float = SOON_S) -> bool:
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until:
        time.sleep(1e-3)
    return bool(what())


class Event:
    """A stand-in for a torch.cuda.Event that completes when the test sets `done`."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Reads(DataPlane):
    """A data plane that copies memory. `held`: reads do not complete. `broken`: the number of next
    reads that fail. `damage`: offsets of bytes that are read wrongly; negative ones count from the
    end. `_peers`: peers that are not released yet."""

    name = "copies"

    def __init__(self) -> None:
        super().__init__()
        self.held, self.broken, self.opened = False, 0, 0
        self.damage: Sequence[int] = ()
        self._peers = set[RemoteMemory]()

    def _register(self, memory: Memory) -> bytes:
        return b""

    def _open(self, peer: RemoteMemory) -> None:
        self.opened += 1
        self._peers.add(peer)

    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        read.handle = extents

    def _check(self, read: Read) -> str | None:
        probes = read.handle[0][2] == 1
        if self.held and not probes:
            return None
        if self.broken and not probes:
            self.broken -= 1
            return "broken"
        for local, remote, length in read.handle:
            ctypes.memmove(local, remote, length)
            for offset in self.damage if not probes else ():
                (ctypes.c_uint8 * length).from_address(local)[offset % length] ^= 0xFF
        return ""

    def _drop(self, peer: RemoteMemory) -> None:
        self._peers.discard(peer)


class Reporter:
    """Records what a channel reports. `seen`, `details`: all notes except those about weights,
    which are in `weighed`. `bytes`, `copying`: the bytes and seconds of all copies. `announcing`:
    seconds from each chunk to its READY. `ticks`: the number of ticks of the channel's thread.
    `digest`: the CRC of this side's weight version."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.details: list[str] = []
        self.announcing: list[float] = []
        self.bytes, self.copying, self.ticks = 0, 0.0, 0
        self.digest, self.weighed = 0, list[str]()

    def __call__(self, note: Any) -> None:
        if note.what.startswith("weights_"):
            self.weighed.append(note.what)
            return
        self.details.append(note.detail)
        self.seen.append(note.what)

    def moved(self, size: int, seconds: float) -> None:
        self.bytes, self.copying = self.bytes + size, self.copying + seconds

    def announced(self, seconds: float) -> None:
        self.announcing.append(seconds)

    def ended(self, entry: Any, reason: str) -> None: ...

    def weights(self) -> int:
        return self.digest

    def ticked(self) -> None:
        self.ticks += 1


def stop(worker: Any) -> None:
    """End a channel's threads and close its resources, which a server leaves to the end of its
    process. Copies in flight complete first; none starts later."""
    worker.stop()
    worker._thread.join(SOON_S)
    if isinstance(worker._copies, HostCopier):
        worker._copies._thread.join(SOON_S)
    elif isinstance(worker._copies, GpuCopier):
        for ticket, _, _ in worker._copies._flying:
            wait_for(ticket.over)
    for thread in threading.enumerate():
        if thread.name == "mixkv-reconnect":
            thread.join(SOON_S)
    getattr(worker, "_links", worker)._context.destroy(linger=0)
    worker._poller._epoll.close()
    os.close(worker._queue.fileno())


class _Side:
    """The parts that both sides share. `memory`: the pool's rows, with K and V in one array, in
    mapped pages that `take_away` makes inaccessible, like SGLang's memory saver. `device`: makes
    GpuRows from rows and staging; None if threads copy. A test may pass its own `rows`, `staging`,
    `plane` and `on_device` (GpuRows), for example on a GPU; with other rows, `memory` is unused."""

    device: Callable[[DraftRows, Staging], Any] | None = None
    size: tuple[int, int]  # slots, and their bytes

    def __init__(
        self, times: Times, rows: DraftRows | None = None, staging: Staging | None = None,
        plane: Any = None, on_device: Any = None,
    ) -> None:  # fmt: skip
        self._mapped = mmap.mmap(-1, PAGES * PAGE * TOKEN_BYTES)
        flat = np.frombuffer(self._mapped, np.uint8)
        self.memory = flat.reshape(2, PAGES * PAGE, len(HEADS), 16)
        self.memory[:] = CANARY
        entries = [torch.from_numpy(entry) for entry in self.memory]
        self.rows = rows or DraftRows(entries, HEADS)
        self.staging = staging or Staging(*self.size, torch.device("cpu"))
        self.slots, self.plane = SlotPool(self.staging.count, times), plane or Reads()
        self.instance, self.closed, self.notes = messages.draw_instance(), False, Reporter()
        self.plane.register(Memory(self.staging.address, self.staging.size, self.rows.device.index))
        make = type(self).device
        on_device = make(self.rows, self.staging) if make is not None else on_device
        self.store = Store(self.rows, self.staging, self.plane, on_device)

    def segment_tokens(self, heads: int, slot_bytes: int) -> int:
        """Return the number of tokens in a segment that fits a slot on both sides."""
        size = min(self.staging.slot_bytes, slot_bytes) - SLOT_OVERHEAD
        return size // (self.rows.bytes_per_head * heads)

    def take_away(self) -> None:
        """Make any further access to the pool kill the process."""
        address, size = self.memory.ctypes.data, self.memory.nbytes
        no_access = 0  # PROT_NONE
        found = ctypes.CDLL(None).mprotect(
            ctypes.c_void_p(address), ctypes.c_size_t(size), no_access
        )
        assert found == 0


class Prefill(_Side):
    size = SLOTS, SLOT_BYTES + 512

    def __init__(self, times: Times, port: int = 0, host: str = HOST, **given: Any) -> None:
        super().__init__(times, **given)
        self.memory[:] = np.random.default_rng(port).integers(0, 256, self.memory.shape)
        machine = prefill_machine.Machine(
            self.instance, self.rows.heads, self.segment_tokens, self.slots, times,
            messages.draws().__next__,
        )  # fmt: skip
        self.channel = PrefillWorker(machine, self.store, times, self.notes, host, port)
        facts = StagingFacts(
            self.plane.name, self.plane.endpoint, self.staging.address, self.staging.slot_bytes,
            self.staging.count,
        )  # fmt: skip
        self.row: Any = SimpleNamespace(
            instance=self.instance, address=self.channel.address, staging=facts
        )

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            stop(self.channel)

    def pages(self, tokens: int, events: Sequence[Event] = ()) -> Pages:
        """Return the last pages of the pool in reverse order."""
        return Pages(np.arange(PAGES)[::-1][: -(-tokens // PAGE)], PAGE, events)

    def send(
        self, room: int, tokens: int, first: int = 0, events: Sequence[Event] = (),
        pages: Pages | None = None,
    ) -> SendHandle:  # fmt: skip
        """Send a request of one chunk."""
        handle = self.channel.begin(room)
        self.channel.add_chunk(handle, first, tokens, True, pages or self.pages(tokens, events))
        return handle


class Decode(_Side):
    size = SLOTS + 3, SLOT_BYTES

    def __init__(
        self, times: Times, restarted: Callable[[bytes], None] = lambda _: None,
        lost: Callable[[bytes], None] = lambda _: None, **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(times, **given)
        machine = decode_machine.Machine(self.instance, self.slots, self.staging.slot_bytes, times)
        self.channel = DecodeWorker(machine, self.store, times, self.notes, restarted, lost)

    def reach(self, row: Any, server: str = "") -> bytes:
        """Connect to the rank with this row, and return its peer."""
        link = self.channel.dial(row, server)
        self.channel.add(link)
        return link.peer

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            stop(self.channel)

    def open(
        self, room: int, tokens: int, peer: bytes, first: int = 0, event: Any = None,
        source: Source | None = None, pages: Any = None, page: int = PAGE,
    ) -> ReceiveHandle:  # fmt: skip
        """Open a request for tokens [first, first + tokens), by default in every second page."""
        source = source or Source(peer, HEADS, 1, SLOTS, SEGMENT)
        if pages is None:
            pages = np.arange(0, PAGES, 2)[: -(-tokens // PAGE)]
        handle = ReceiveHandle(pages, page, event)
        self.channel.open(
            handle, bootstrap_room=room, sources=(source,), first_token=first, end=first + tokens
        )
        return handle

    def rows_of(self, handle: ReceiveHandle) -> np.ndarray:
        found: np.ndarray = self.memory[
            :, handle.rows(handle.opened.first_token, handle.opened.end)
        ]
        return found


class Channel:
    """A prefill rank and a decode rank connected to it. Leaving the context also checks for leaked
    threads."""

    def __init__(self, times: Times | None = None) -> None:
        self.times, self._before = times or Times(), set(threading.enumerate())
        self.prefill, self.decode = Prefill(self.times), Decode(self.times)
        self.connect(self.prefill)

    def connect(self, prefill: Prefill) -> None:
        self.decode.reach(prefill.row)
        assert wait_for(lambda: prefill.instance in self.decode.channel._links)

    def open(self, room: int, tokens: int, **more: Any) -> ReceiveHandle:
        return self.decode.open(room, tokens, self.prefill.instance, **more)

    def state(self, handle: ReceiveHandle) -> tuple[str, str]:
        """Wait for a room's outcome; return it and its reason."""
        assert wait_for(lambda: handle.state is not None), "the room is not decided"
        assert handle.state is not None
        return handle.state.value, handle.reason

    def request(
        self, room: int, tokens: int = 20, arrived: bool = False, **more: Any
    ) -> tuple[str, str]:
        """Run a whole request, and compare every byte. `arrived`: its target has arrived, which
        limits the wait for draft KV."""
        sent, handle = self.prefill.send(room, tokens), self.open(room, tokens, **more)
        if arrived:
            self.decode.channel.target_arrived(handle)
        found = self.state(handle)
        assert found[0] != "warm" or self.same(handle)
        assert found[0] != "cold" or not self.decode.rows_of(handle).any()
        self.end(sent, handle)
        return found

    def same(self, handle: ReceiveHandle) -> bool:
        """Return whether the room's rows equal prefill's."""
        tokens = handle.opened.end - handle.opened.first_token
        there = self.prefill.memory[:, self.prefill.pages(tokens).rows(0, tokens)]
        return bool(np.array_equal(self.decode.rows_of(handle), there))

    def end(self, sent: SendHandle, handle: ReceiveHandle) -> None:
        self.prefill.channel.end(sent)
        self.decode.channel.close(handle)

    def check_three_at_once(self) -> None:
        """Check that three concurrent rooms are correct, and that both sides count each byte once.
        The rooms have one or several segments; the last one has a prefix."""
        rooms = [(1, 1, 0), (2, 20, 0), (3, 64, 8)]
        handles = [self.open(number, tokens, first=first) for number, tokens, first in rooms]
        sent = [self.prefill.send(number, tokens, first) for number, tokens, first in rooms]
        for one, handle in zip(sent, handles, strict=True):
            assert self.state(handle) == ("warm", "")
            assert self.same(handle)
            self.end(one, handle)
        for side in self.prefill, self.decode:
            assert side.notes.bytes == 85 * TOKEN_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.decode.close()
        self.prefill.close()
        here = set(threading.enumerate()) - self._before
        assert not [t.name for t in here if t.name.startswith("mixkv-")]

    def at_rest(self) -> bool:
        """Wait until no room is left and every slot is free; return False after the time limit."""
        sides = self.prefill, self.decode
        return wait_for(
            lambda: (
                [] == left(self.prefill.channel) == left(self.decode.channel)
                and all(len(side.slots.free_slots) == side.slots.count for side in sides)
            )
        )
