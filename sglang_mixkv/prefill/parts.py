"""A room, one request on a prefill rank, and its parts: what each of its readers gets of it."""

from __future__ import annotations

from typing import NamedTuple

from sglang_mixkv.channel.messages import Open, Ready
from sglang_mixkv.prefill.events import AddChunk, Connection, UseNumber


class Absent(NamedTuple):
    """A reader for which a request has ended. `generation`: its last; `readers`: as its OPEN
    has it, 0 where that was lost."""

    generation: int = -1
    readers: int = 0


NOBODY = Absent()


class Room:
    """The sender's side. `absent`: readers that have ended this request and have no part in it.
    `written`: how many of the chunks are. `sent`: when SGLang's own transfer
    succeeded; `progress`: when packing last went on."""

    def __init__(self, bootstrap_room: int, use: UseNumber, now: float) -> None:
        self.bootstrap_room, self.use = bootstrap_room, use
        self.parts: dict[bytes, Part] = {}  # by reader
        self.absent: dict[bytes, Absent] = {}
        self.chunks: list[AddChunk] = []
        self.written = 0
        self.sent: float | None = None
        self.progress = now
        self.settled = False

    def generation(self, reader: bytes) -> int:
        """The reader's, -1 where it has neither opened nor ended this request."""
        part = self.parts.get(reader)
        if part is not None:
            return part.opened.generation
        return self.absent.get(reader, NOBODY).generation

    def note_written(self, chunks: int) -> bool:
        """So many pending chunks are; those behind them that were never pending are with them."""
        before = self.written
        self.written += chunks
        while self.written < len(self.chunks) and not self.chunks[self.written].pending:
            self.written += 1
        return self.written > before

    @property
    def _readers(self) -> int:
        """How many there are, by their OPENs; 0 as long as none has come."""
        opened = (part.opened.readers for part in self.parts.values())
        return max((*opened, *(one.readers for one in self.absent.values())), default=0)

    @property
    def missing(self) -> int:
        """Readers that have not opened; at least one where none has."""
        known = len(self.parts) + len(self.absent)
        return (self._readers or known + 1) - known

    @property
    def all_ended(self) -> bool:
        """Where none has opened, and some never will, the others have time until SGLang's transfer
        has succeeded."""
        if self.absent and not self._readers:
            return self.sent is not None
        return self.missing <= 0 and all(part.ended for part in self.parts.values())


class Part:
    """The reader's side. `room` is None until SGLang's sender is here.

    `token` is the first that is not cut into a segment yet, in chunk number `chunk` or behind it.
    `segments` are cut, and the READYs of the first `offered` are sent; `packed`: READYs by segment
    that wait for one before them.
    """

    def __init__(self, opened: Open, connection: Connection, now: float) -> None:
        self.opened, self.connection, self.since = opened, connection, now
        self.room: Room | None = None
        self.chunk = 0
        self.token = opened.first_token
        self.segments = 0
        self.offered = 0
        self.packed: dict[int, Ready] = {}
        self.complete = not opened.wanted
        self.over = False

    @property
    def ended(self) -> bool:
        return self.complete or self.over

    @property
    def reader(self) -> bytes:
        return self.opened.reader

    def next_chunk(self) -> AddChunk | None:
        """The written chunk that the next token is in, or the last one; None: it is not there."""
        assert self.room is not None
        while self.chunk < self.room.written:
            chunk = self.room.chunks[self.chunk]
            if not self.segments:  # a reader cannot want what its prefix has left out
                self.token = max(self.token, chunk.first)
            if self.token < chunk.first + chunk.count or chunk.last:
                return chunk
            self.chunk += 1
        return None

    def cut(self, slot: int, stamp: int, limit: int) -> tuple[AddChunk, int, Ready]:
        """The next segment, of `limit` tokens at most: its chunk, its offset there, its READY."""
        chunk = self.next_chunk()
        assert chunk is not None
        first, end = self.token, chunk.first + chunk.count
        count = max(0, min(end - first, limit))
        ready = Ready(
            self.opened.room, self.opened.generation, self.segments, slot, stamp, first, count,
            last=chunk.last and first + count >= end,
        )  # fmt: skip
        self.token += count
        self.segments += 1
        return chunk, first - chunk.first, ready


def refusal(opened: Open, instance: bytes, held: range) -> tuple[str, str] | None:
    """A code and a detail where this instance, with these heads, cannot serve it."""
    wanted = opened.wanted
    if opened.prefill != instance:
        return "restarted", "this prefill rank is another instance than the one addressed"
    if wanted and not (held.start <= wanted.start and wanted.stop <= held.stop):
        return "heads", f"heads {list(opened.heads)} of a rank with {held.start}..{held.stop}"
    return None
