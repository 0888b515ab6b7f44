"""Both sides of the draft channel without SGLang: its threads, its sockets, and a pool each."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
from scene import SLOT, SLOTS
from sglang_mixkv.decode.copier import Entry
from sglang_mixkv.decode.inbox import Inbox, Store
from sglang_mixkv.prefill.outbox import Outbox, Pages, Use

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.data_plane import DataPlane, Memory, Outcome, Peer, Read
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode import rooms as decode_rooms
from sglang_mixkv.draft import rows as product
from sglang_mixkv.draft.facts import StagingFacts
from sglang_mixkv.draft.layout import SLOT_OVERHEAD
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.prefill import rooms as prefill_rooms

HOST = "127.0.0.1"
TIMES = Times(20)  # nothing here is late
LIMIT_S = 60.0


class Row(msgspec.Struct):
    """What decode looks at of a prefill rank's row (draft/facts.py). `heads`: first, end."""

    instance: bytes
    address: str
    staging: StagingFacts
    heads: tuple[int, int]


class Moved:
    """Notes that count the copies of one side, and retain what went wrong."""

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0
        self.notes: list[str] = []

    def __call__(self, note: Any) -> None:
        self.notes.append(f"{note.what} {note.detail}".strip())

    def moved(self, size: int, seconds: float) -> None:
        self.bytes += size
        self.seconds += seconds

    def ended(self, entry: Any, reason: str) -> None: ...

    def ticked(self) -> None: ...

    def publish(self) -> None: ...


def staged(rows: DraftRows, plane: Any) -> tuple[Staging, Any]:
    """Slots beside these rows, registered with a plane."""
    device = rows.device
    staging = Staging(SLOTS, SLOT[device.type], device)
    number = (device.index or 0) if device.type == "cuda" else None
    plane.register(Memory(staging.address, staging.size, number), staging.address + 8)
    return staging, plane


class Prefill:
    """`plane`: `staging` is registered with it."""

    def __init__(
        self, rows: DraftRows, staging: Staging, plane: DataPlane, host: str = HOST
    ) -> None:
        def segment_tokens(heads: int, slot_bytes: int) -> int:
            size = min(staging.slot_bytes, slot_bytes) - SLOT_OVERHEAD
            return size // rows.bytes_per_token(heads)

        instance, self.notes = messages.draw_instance(), Moved()
        slots = SlotPool(SLOTS, TIMES)
        rooms = prefill_rooms.Rooms(instance, rows.heads, segment_tokens, slots, TIMES)
        self.outbox = Outbox(rooms, rows, staging, plane, host, 0, TIMES, self.notes)
        facts = StagingFacts(
            plane.name, plane.endpoint, staging.address, staging.slot_bytes, SLOTS
        )  # fmt: skip
        heads = rows.heads.start, rows.heads.stop
        self.row = Row(instance, self.outbox.address, facts, heads)

    def send(self, room: int, tokens: int, pages: Pages) -> Use:
        """A request of one chunk."""
        use = self.outbox.begin(room)
        self.outbox.add_chunk(use, 0, tokens, True, pages)
        return use

    def end(self, use: Use) -> None:
        until = time.monotonic() + LIMIT_S
        while not use.settled and time.monotonic() < until:
            time.sleep(1e-3)
        self.outbox.end(use)


class Decode:
    """`rows`: of the heads that this rank wants."""

    def __init__(self, rows: DraftRows, staging: Staging, plane: DataPlane) -> None:
        self.rows, self.staging, self.notes = rows, staging, Moved()
        rooms = decode_rooms.Rooms(
            messages.draw_instance(), SlotPool(SLOTS, TIMES), staging.slot_bytes, TIMES
        )
        store = Store(rows, staging, plane)
        self.inbox = Inbox(rooms, store, TIMES, self.notes, lambda _: None)

    def source(self, row: Row) -> ev.Source:
        """This prefill rank, connected."""
        self.inbox.add(self.inbox.dial(row))  # type: ignore[arg-type]
        size = min(row.staging.slot_bytes, self.staging.slot_bytes) - SLOT_OVERHEAD
        mine = self.rows.heads
        heads = range(max(row.heads[0], mine.start), min(row.heads[1], mine.stop))
        tokens = size // self.rows.bytes_per_token(len(heads))
        return ev.Source(row.instance, heads, 1, row.staging.slots, tokens)

    def fetch(
        self, room: int, tokens: int, sources: Any, pages: Any, page_size: int, event: Any = None
    ) -> str:
        """What becomes of a room: "warm", or its state and why."""
        opened = ev.OpenRoom(
            self.inbox.new_generation(), room, tuple(sources), 0, tokens,
            pending=event is not None,
        )  # fmt: skip
        entry = Entry(opened, pages, page_size, event)
        self.inbox.open(entry)
        until = time.monotonic() + LIMIT_S
        while entry.state is None and time.monotonic() < until:
            time.sleep(1e-4)
        state = entry.state
        self.inbox.close(entry, "" if state is ev.State.WARM else "it did not become warm")
        if state is ev.State.WARM:
            return "warm"
        return " ".join([str(state), entry.reason, *self.notes.notes[-3:]])


class Local(DataPlane):
    """Reads between `stagings`, of this process; as a network card's they wait for no stream."""

    name = "local"

    def __init__(self, stagings: list[Staging]) -> None:
        super().__init__()
        self._stagings = stagings

    def _at(self, address: int, length: int) -> torch.Tensor:
        (one,) = (s for s in self._stagings if 0 <= address - s.address < s.size)
        slot, offset = divmod(address - one.address, one.slot_bytes)
        return one.slot(slot)[offset : offset + length]

    def _register(self, memory: Memory) -> bytes:
        return b"local"

    def _open(self, peer: Peer) -> None:
        peer.link = "local"

    def _post(self, read: Read, local: int, remote: int, length: int) -> None:
        with product.own_stream(self._stagings[0].device):
            self._at(local, length).copy_(self._at(remote, length))
        read.ended = Outcome.DONE

    def _check(self, read: Read) -> Outcome | None:
        return read.ended

    def _release(self, read: Read) -> None: ...

    def _drop(self, peer: Peer) -> None: ...

    def _close(self) -> None: ...
