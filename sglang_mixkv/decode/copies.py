"""Copies of a decode rank: segments from a slot to the pool, and rows that are cleared."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_mixkv.decode.events import Clear, Generation, JobDone, Unpack
from sglang_mixkv.decode.parts import Room
from sglang_mixkv.decode.reads import Segment


class Copies:
    """`hold` keeps segments that were read while an earlier forward may still write to the rows
    they belong in."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[Room, Segment | None]] = {}  # None: clearing
        self._held: dict[Generation, list[Segment]] = {}
        self._job = 0

    def hold(self, segment: Segment) -> None:
        self._held.setdefault(segment.room.generation, []).append(segment)

    def take_held(self, room: Room) -> list[Segment]:
        return self._held.pop(room.generation, [])

    def unpack(self, segment: Segment) -> Unpack:
        room, ready = segment.room, segment.ready
        room.unpacking += 1
        return Unpack(
            self._begin(room, segment), room.generation, ready.first_token, ready.count,
            segment.part.source.heads, segment.slot, ready.stamp, ready.checksum,
        )  # fmt: skip

    def clear(self, room: Room) -> Clear:
        """The rows that are not in place."""
        room.clearing = True
        return Clear(self._begin(room, None), room.generation, room.placed_to, room.opened.end)

    def _begin(self, room: Room, segment: Segment | None) -> int:
        self._job += 1
        self._jobs[self._job] = room, segment
        return self._job

    def end(self, event: JobDone) -> tuple[Room, Segment | None]:
        """The segment's slot is the caller's. None: its rows were to be cleared."""
        room, segment = self._jobs.pop(event.job)
        room.unpacking -= segment is not None
        return room, segment

    @property
    def held(self) -> int:
        return sum(map(len, self._held.values()))

    @property
    def unpacking(self) -> int:
        return sum(segment is not None for _, segment in self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    def orphans(self) -> Iterator[Generation]:
        """Of held segments; the caller knows which of them have a room."""
        return iter(self._held)
