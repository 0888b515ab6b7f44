"""A prefill rank's Request, its ReaderTransfer to each reader, their Segments, each of which fits a
slot, and Packing, which chooses the segments to pack next.

A *handle* identifies one of SGLang's senders (in a server, the SendHandle): room numbers are
reused, handles are not. A *connection* is the socket's ID for the origin of a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from sglang_mixkv.channel.messages import Announced, Open, Ready
from sglang_mixkv.channel.slots import RoundRobin, SlotPool, list_of
from sglang_mixkv.draft.copier import Outcome
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.slot_format import SlotCheck

MAX_IN_FLIGHT = 16  # segments being packed at once: two READYs' worth for one reader


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [first, first + count) of the prompt, in `pages`."""

    first: int
    count: int
    last: bool
    pages: Pages


class Request:
    """A request, or OPENs that arrived before it, with `handle` None. `readers`: how many it has,
    according to its OPENs; 1 before the first. `sent`: when SGLang's own transfer succeeded.
    `progress`: when it last began, was opened by a reader, or had segments announced."""

    def __init__(self, number: int, now: float) -> None:
        self.number, self.progress = number, now
        self.handle: Hashable | None = None
        self.transfers: dict[bytes, ReaderTransfer] = {}  # by reader
        self.readers = 1
        self.chunks: list[Chunk] = []
        self.sent: float | None = None
        self.pages_released = False

    @property
    def missing(self) -> int:
        """The number of readers that have not opened the request; at least 1 if none has."""
        return self.readers - len(self.transfers)

    def expects(self, reader: bytes) -> bool:
        return self.missing > 0 and not self.pages_released and reader not in self.transfers


class Segment(msgspec.Struct, eq=False, gc=False):
    """`count` tokens of a chunk, from token `first` of the prompt on, in a slot of this rank.
    `ends`: the chunk ends with these tokens. `packed`: the bytes are in the slot. The garbage
    collector need not track segments, since their reference cycles are broken explicitly."""

    transfer: ReaderTransfer
    chunk: Chunk
    slot: int
    stamp: int
    first: int
    count: int
    ends: bool
    packed: bool = False


class ReaderTransfer:
    """The transfer of a request to one reader, in segments of at most `limit` tokens.

    `token`: the next token to cut into a segment, from the chunk `at`, which has the index `chunk`
    and ends before token `until`. `packing`: the segments cut but not yet announced, in the order
    of the prompt. `announced`: how many segments were announced. `all_cut`: no further segments
    follow. `ended`: the last READY was made, or the transfer failed.
    """

    def __init__(
        self, request: Request, opened: Open, connection: bytes, wanted: range, limit: int
    ) -> None:
        self.request, self.opened, self.connection, self.limit = request, opened, connection, limit
        self.reader, self.wanted = opened.reader, wanted
        self.at: Chunk | None = None
        self.chunk, self.announced = 0, 0
        self.token = self.until = opened.first_token
        self.packing: deque[Segment] = deque()
        self.ended = not self.wanted
        self.all_cut = False

    def advance(self) -> bool:
        """Move to the next token that is in a chunk; return whether there is one to cut."""
        if self.ended:
            return False
        chunks = self.request.chunks
        while self.chunk < len(chunks):
            chunk = chunks[self.chunk]
            if self.token < chunk.first:  # earlier tokens are not in its pages
                self.token = chunk.first
            if self.token < chunk.first + chunk.count:
                self.at, self.until = chunk, chunk.first + chunk.count
                return True
            if chunk.last:
                self.all_cut = True
                return False
            self.chunk += 1
        return False

    def cut(self, slot: int, stamp: int) -> Segment:
        chunk, first = self.at, self.token
        assert chunk is not None
        self.token = min(self.until, first + self.limit)
        ends = self.token == self.until
        segment = Segment(self, chunk, slot, stamp, first, self.token - first, ends)
        self.packing.append(segment)
        return segment

    def ready(self, limit: int) -> tuple[Ready, list[Pages]] | None:
        """Return the READY that can be sent now, and the pages of each chunk that it completes, or
        None. It has up to `limit` packed segments. It stops before the first unpacked one, since
        segments are announced in order."""
        found, ended = list[Announced](), list[Pages]()
        packing = self.packing
        first = packing[0].first if packing else self.token
        while packing and packing[0].packed and len(found) < limit:
            segment = packing.popleft()
            found.append(Announced(segment.slot, segment.stamp, segment.count))
            if segment.ends:
                ended.append(segment.chunk.pages)
        self.ended = self.all_cut and not packing
        if not (found or self.ended):
            return None
        number = self.announced
        self.announced += len(found)
        room, generation = self.opened.room, self.opened.generation
        return Ready(room, generation, number, first, tuple(found), self.ended), ended


class Packing:
    """The packing of segments into slots. Transfers with more to pack wait for slots, and their
    readers take turns. `announcing`: transfers with a packed segment, or with no more to cut.
    `draw_stamp`: returns an unpredictable number that it never returned before."""

    def __init__(self, slots: SlotPool, draw_stamp: Callable[[], int]) -> None:
        self._slots, self._draw = slots, draw_stamp
        self._list = list_of(slots.count)
        self.turns: RoundRobin[ReaderTransfer] = RoundRobin(self._list)
        self.announcing: dict[ReaderTransfer, None] = {}
        self._begun = 0

    def add(self, transfers: Iterable[ReaderTransfer]) -> None:
        """Queue those transfers that have more to pack, or have cut their last segment."""
        for transfer in transfers:
            if transfer.advance():
                self.turns.add(transfer.reader, transfer)
            elif transfer.all_cut:
                self.announcing[transfer] = None

    def start(self) -> tuple[Segment, ...]:
        found = []
        for transfer, slot in self.turns.take(self._slots, MAX_IN_FLIGHT - self._begun):
            segment = transfer.cut(slot, self._draw())
            found.append(segment)
            if not segment.ends or transfer.advance():
                self.turns.add(transfer.reader, transfer)
        self._begun += len(found)
        return tuple(found)

    def end(self, segments: Sequence[Segment], outcome: Outcome) -> list[ReaderTransfer]:
        """Record the end of these segments' packing; return the transfers that fail with it. Free
        unpacked slots. A closed gate fails no transfer, since the request's end follows."""
        self._begun -= len(segments)
        failed: dict[ReaderTransfer, None] = {}
        is_packed = outcome is SlotCheck.OK
        for segment in segments:
            transfer = segment.transfer
            if is_packed and not transfer.ended:
                segment.packed = True
                self.announcing[transfer] = None
                continue
            self._slots.free(segment.slot)
            if not (transfer.ended or outcome is None):
                failed[transfer] = None
        return list(failed)

    def announce(self, now: float) -> list[tuple[ReaderTransfer, Ready, list[Pages]]]:
        """Publish slots. Return their READYs, with the pages of chunks that each completes."""
        found = []
        for transfer in self.announcing:
            while not transfer.ended and (made := transfer.ready(self._list)):
                for one in made[0].segments:
                    self._slots.publish(one.slot, one.stamp, now)
                found.append((transfer, *made))
        self.announcing = {}
        return found

    def drop(self, transfer: ReaderTransfer) -> None:
        """Stop packing and announcing this transfer; free its packed slots."""
        self.turns.remove(transfer.reader, transfer)
        for segment in transfer.packing:
            if segment.packed:
                self._slots.free(segment.slot)
        transfer.packing.clear()
