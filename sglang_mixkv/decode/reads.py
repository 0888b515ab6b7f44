r"""Segments on their way from a prefill rank's slots to this rank's, and what becomes of the slots.

    waiting --StartRead--> running --ReadDone--> arrived --> the caller's, with its local slot
       |                      |  \--ReadFailed--> landing --ReadSettled--> gone
       +---- dropped          +-- given up, as soon as it took too long

A segment is acknowledged once: when its read has ended, when it cannot land any more, or when it
is dropped before it was read. The local slot is free in the same moment, or when the caller frees
it.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_mixkv.channel.messages import Ready
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.turns import Turns
from sglang_mixkv.decode.events import StartRead
from sglang_mixkv.decode.parts import Part, Room


class Segment:
    """`announced`: when its READY came; `started`: when its read was; `failed`: it is not to be
    used any more."""

    def __init__(self, room: Room, part: Part, ready: Ready, now: float) -> None:
        self.room, self.part, self.ready, self.announced = room, part, ready, now
        self.read = 0
        self.slot = 0
        self.started = 0.0
        self.failed = False

    @property
    def peer(self) -> bytes:
        return self.part.source.peer

    @property
    def key(self) -> tuple[int, int]:
        return self.room.generation, self.ready.segment


class Reads:
    def __init__(self, slots: SlotPool) -> None:
        self.slots = slots
        self._turns: Turns[Segment] = Turns()
        self._waiting: dict[int, dict[tuple[bytes, int], Segment]] = {}  # by generation
        self._running: dict[int, Segment] = {}  # by read; the longest first
        self._number = 0

    def add(self, segment: Segment) -> None:
        self._turns.add(segment.peer, segment.key, segment)
        of_room = self._waiting.setdefault(segment.room.generation, {})
        of_room[segment.peer, segment.ready.segment] = segment

    def drop_waiting(self, room: Room) -> list[Segment]:
        """Those of a room that no read was begun for. The caller acknowledges them."""
        dropped = list(self._waiting.pop(room.generation, {}).values())
        for segment in dropped:
            self._turns.remove(segment.peer, segment.key)
        return dropped

    def start(self, now: float) -> list[StartRead]:
        """As many as there are slots for."""
        started: list[StartRead] = []

        def start_one(segment: Segment) -> bool | None:
            if not self.slots.can_take(segment.peer, now):
                return None
            started.append(self._start(segment, now))
            return False

        self._turns.serve(start_one, lambda: self.slots.free_slots)
        return started

    def _start(self, segment: Segment, now: float) -> StartRead:
        of_room = self._waiting[segment.room.generation]
        del of_room[segment.peer, segment.ready.segment]
        if not of_room:
            del self._waiting[segment.room.generation]
        self._number += 1
        segment.read, segment.started = self._number, now
        segment.slot = self.slots.take(segment.peer, now)
        self._running[segment.read] = segment
        ready, heads = segment.ready, len(segment.part.source.heads)
        return StartRead(
            segment.read, segment.peer, ready.slot, segment.slot, ready.count, heads
        )  # fmt: skip

    def is_reading(self, peer: bytes, ready: Ready) -> bool:
        running = self._running.values()
        return any(s.peer == peer and s.ready.stamp == ready.stamp for s in running)

    def get(self, read: int) -> Segment:
        return self._running[read]

    def end(self, read: int) -> Segment:
        """Nothing lands in its slot any more; the slot is the caller's."""
        return self._running.pop(read)

    def overdue(self, limit: float) -> Iterator[Segment]:
        """Reads begun at this time or before, and not given up yet."""
        for segment in list(self._running.values()):
            if segment.started > limit:
                return
            if not segment.failed:
                yield segment

    def unread(self, limit: float) -> Iterator[Segment]:
        """The oldest of each room that was announced at this time or before, and still waits."""
        for segments in list(self._waiting.values()):
            segment = next(iter(segments.values()))
            if segment.announced <= limit:
                yield segment

    @property
    def running(self) -> int:
        return len(self._running)

    def __len__(self) -> int:
        return len(self._running) + len(self._turns)
