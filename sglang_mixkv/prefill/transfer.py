"""Room, Part and Segment of a prefill rank: a request, what each reader gets of it, in pieces that
fit slots; and Packing, which chooses the segments that are packed next.

A *use* is one sender of SGLang's, by whatever names it (in a server its SendHandle): room numbers
come again, uses do not. A *connection* is how the socket names where a message came from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import msgspec

from sglang_mixkv.channel.messages import Announced, Open, Ready
from sglang_mixkv.channel.slot_format import SlotCheck
from sglang_mixkv.channel.slots import RoundRobin, SlotPool, list_of
from sglang_mixkv.draft.copier import Outcome

Use = Hashable
Connection = bytes
MAX_IN_FLIGHT = 16  # segments that are packed at once: two batches of a reader's


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [first, first + count) of the prompt. `pages`: where they are (Pages in
    draft/layout.py); opaque here. `pending`: their KV may not be written yet."""

    use: Use
    first: int
    count: int
    last: bool
    pages: Any
    pending: bool


class Room:
    """One request, or the readers that have opened one which is not here yet: `use` is None then.
    `readers`: how many there are, by their OPENs, and one before. `written`: how many of the chunks
    are. `sent`: when SGLang's own transfer succeeded; `progress`: when packing last
    went on, it began, or a reader opened it."""

    def __init__(self, number: int, now: float) -> None:
        self.number, self.progress = number, now
        self.use: Use | None = None
        self.parts: dict[bytes, Part] = {}  # by reader
        self.readers = 1
        self.chunks: list[Chunk] = []
        self.written = 0
        self.sent: float | None = None
        self.settled = False

    def note_written(self, pending: bool) -> Iterable[Part]:
        """Mark the next pending chunk as written, if one is, and all others that follow. The parts
        for which there is more to pack."""
        before = self.written
        self.written += pending
        while self.written < len(self.chunks) and not self.chunks[self.written].pending:
            self.written += 1
        return self.parts.values() if self.written > before else ()

    @property
    def missing(self) -> int:
        """Readers that have not opened; at least one where none has."""
        return self.readers - len(self.parts)

    @property
    def all_ended(self) -> bool:
        if self.missing > 0:
            return False
        for part in self.parts.values():  # noqa: SIM110, a generator would cost more calls
            if not (part.complete or part.over):
                return False
        return True


class Segment(msgspec.Struct, eq=False, gc=False):
    """`count` tokens of a chunk, from token `first` of the prompt on, in a slot of this rank.
    `packed`: the bytes are there. The garbage collector need not look at it: nothing that it refers
    to outlives it by a cycle through it."""

    part: Part
    chunk: Chunk
    slot: int
    stamp: int
    first: int
    count: int
    packed: bool = False


class Part:
    """The part of a room that one reader gets. `limit`: how many tokens a segment has at most.

    `token` is the first that is not cut into a segment yet, `at` the written chunk that it is in,
    which has number `chunk`. `packing`: segments that were cut and not announced, in the order of
    the prompt; `announced`: how many were; `all_cut`: no more follow. A part is `complete` once the
    last READY has left, and `over` once it failed.
    """

    def __init__(self, room: Room, opened: Open, connection: Connection, limit: int) -> None:
        self.room, self.opened, self.connection, self.limit = room, opened, connection, limit
        self.reader, self.wanted = opened.reader, opened.wanted
        self.at: Chunk | None = None
        self.chunk, self.announced = 0, 0
        self.token = opened.first_token
        self.packing: deque[Segment] = deque()
        self.complete = not self.wanted
        self.all_cut = self.over = False

    @property
    def ended(self) -> bool:
        return self.complete or self.over

    def advance(self) -> bool:
        """Return whether a segment can be cut from the chunks that are written."""
        if self.complete or self.over:
            return False
        chunks, written = self.room.chunks, self.room.written
        while self.chunk < written:
            chunk = chunks[self.chunk]
            if not (self.announced or self.packing) and self.token < chunk.first:
                self.token = chunk.first  # a reader cannot want what its prefix has left out
            if self.token < chunk.first + chunk.count:
                self.at = chunk
                return True
            if chunk.last:
                self.all_cut = True
                return False
            self.chunk += 1
        return False

    def cut(self, slot: int, stamp: int) -> Segment:
        """The next segment."""
        chunk, first = self.at, self.token
        assert chunk is not None
        count = min(chunk.first + chunk.count - first, self.limit)
        segment = Segment(self, chunk, slot, stamp, first, count)
        self.packing.append(segment)
        self.token += count
        return segment

    def ready(self, limit: int) -> tuple[Ready, list[Chunk]] | None:
        """Return what can be announced now, `limit` segments or fewer: those that are packed, up to
        the first that is not, since segments of a part are announced in their order. And their
        chunks that end."""
        found, ended = list[Announced](), list[Chunk]()
        packing = self.packing
        first = packing[0].first if packing else self.token
        while packing and packing[0].packed and len(found) < limit:
            segment = packing.popleft()
            found.append(Announced(segment.slot, segment.stamp, segment.count))
            chunk = segment.chunk
            if segment.first + segment.count == chunk.first + chunk.count:
                ended.append(chunk)
        self.complete = self.all_cut and not packing
        if not (found or self.complete):
            return None
        number = self.announced
        self.announced += len(found)
        room, generation = self.opened.room, self.opened.generation
        return Ready(room, generation, number, first, tuple(found), self.complete), ended


class Packing:
    """Segments on their way into slots. Parts with something to pack wait for slots, and readers
    take turns. `announcing`: parts with a segment that was packed, or at their end.

    `segment_tokens`: how many tokens of so many heads fit a slot here and one of so many bytes.
    `draw_stamp`: unlike any earlier number, and not to be guessed.
    """

    def __init__(
        self, segment_tokens: Callable[[int, int], int], slots: SlotPool,
        draw_stamp: Callable[[], int],
    ) -> None:  # fmt: skip
        self._segment_tokens, self._slots, self._draw = segment_tokens, slots, draw_stamp
        self._list = list_of(slots.count)
        self.turns: RoundRobin[Part] = RoundRobin(self._list)
        self.announcing: dict[Part, None] = {}
        self._begun = 0

    def __len__(self) -> int:
        return self._begun

    def limit(self, opened: Open) -> int:
        """Return how many tokens of what this reader wants fit a slot of either side."""
        return self._segment_tokens(len(opened.wanted), opened.slot_bytes)

    def add(self, parts: Iterable[Part]) -> None:
        """They have more to pack, or have reached their end."""
        for part in parts:
            if part.advance():
                self.turns.add(part.reader, part)
            elif part.all_cut:
                self.announcing[part] = None

    def start(self) -> tuple[Segment, ...]:
        found = []
        for part, slot in self.turns.take(self._slots, MAX_IN_FLIGHT - self._begun):
            segment = part.cut(slot, self._draw())
            found.append(segment)
            if part.advance():
                self.turns.add(part.reader, part)
        self._begun += len(found)
        return tuple(found)

    def end(self, segments: Sequence[Segment], outcome: Outcome) -> list[Part]:
        """The parts that this ends, of segments that failed. The slot of one that was not packed is
        free. Where its gate was closed, the request's end follows."""
        self._begun -= len(segments)
        failed: dict[Part, None] = {}
        for segment in segments:
            part = segment.part
            if part.over or outcome is not SlotCheck.OK:
                self._slots.free(segment.slot)
                if not (part.over or outcome is None):
                    failed[part] = None
            else:
                segment.packed = True
                self.announcing[part] = None
        return list(failed)

    def announce(self, now: float) -> list[tuple[Part, Ready, list[Chunk]]]:
        """The READYs that can leave, and the chunks that each ends. Their slots are published."""
        found = []
        for part in self.announcing:
            while not (part.complete or part.over) and (made := part.ready(self._list)):
                for one in made[0].segments:
                    self._slots.publish(one.slot, one.stamp, now)
                found.append((part, *made))
        self.announcing = {}
        return found

    def drop(self, part: Part) -> None:
        """Pack and announce nothing more of it."""
        self.turns.remove(part.reader, part)
        for segment in part.packing:
            if segment.packed:
                self._slots.free(segment.slot)
        part.packing.clear()
