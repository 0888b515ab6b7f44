r"""A decode rank's requests: Request, its SourceTransfer from each prefill rank, and their
Segments; RecentRooms, which detects room numbers that are reused too early.

A Request, a *room* in logs and metrics, is identified by its *generation*, since SGLang reuses room
numbers. A *peer* is a prefill rank in the facts of one server. The same rank in another server's
facts is a different peer, so that no server can end another server's transfers. A *handle* is the
caller's name for a request (in a server, its ReceiveHandle).

WAITING --a slot is free--> READING --read_ended--> COPYING --copied--> in place
   |                           |
   +--- dropped: acknowledged  +--- failed, or the room is cold: its slot is free
        unread
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import Announced, Fail, Open, Ready, fail
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.cold import Cold

Generation = int
Peer = bytes


def peer_of(instance: bytes, server: str) -> Peer:
    """Return the peer for a rank in the facts of the server at this bootstrap address."""
    return instance + server.encode()


def instance_of(peer: Peer) -> bytes:
    return peer[: messages.INSTANCE_BYTES]


def server_of(peer: Peer) -> str:
    """Return the bootstrap address of the peer's server."""
    return peer[messages.INSTANCE_BYTES :].decode()


class Source(msgspec.Struct, frozen=True):
    """One contacted prefill rank of the drafter's stage, for one request.

    `heads`: the heads to read, possibly none. `readers`: how many decode ranks open the request on
    that rank. `slots`: how many slots that rank has. `segment_tokens`: how many tokens fit a slot
    on both ranks. `patience`: that rank's setting, which scales the time until it reuses a slot."""

    peer: Peer
    heads: range
    readers: int
    slots: int = 0
    segment_tokens: int = 0
    patience: float = float("inf")


class Opened(msgspec.Struct, frozen=True):
    """A request to open. It owns the rows of tokens [first_token, end); the prompt ends at `end` or
    earlier in its last page of `page_size` tokens.

    `cold`: why nothing is fetched, or ""."""

    generation: Generation
    bootstrap_room: int
    sources: tuple[Source, ...]
    first_token: int
    end: int
    cold: Cold = ""
    version: int = messages.PROTOCOL[1]
    handle: Hashable = None
    page_size: int = 1


class Segment(msgspec.Struct, eq=False, gc=False):
    """An announced segment. `number`, `first`: its place in the transfer, and its first token.
    `since`: when it was announced. `slot`: the slot of this rank from the start of the read on, -1
    before. No garbage collector tracks segments: each is removed from its request's `segments`."""

    request: Request
    transfer: SourceTransfer
    peer: Peer
    announced: Announced
    number: int
    first: int
    since: float
    slot: int = -1


class SourceTransfer:
    """The transfer of a request from one prefill rank.

    `announced`, `token`: number and first token of the next segment to be announced. `last`: all
    have been announced. `placed`: maps the number of each segment whose rows are in the pool to the
    token after it. `complete`: all segments are placed."""

    def __init__(self, source: Source, first_token: int) -> None:
        self.source = source
        self.announced, self.token = 0, first_token
        self.last = self.complete = False
        self.placed: dict[int, int] = {}
        self._first_token = first_token

    def place(self, segment: Segment) -> None:
        self.placed[segment.number] = segment.first + segment.announced.count
        self.complete = self.last and len(self.placed) == self.announced

    @property
    def placed_to(self) -> int:
        """Return the first token whose rows are not in place."""
        segment, token = 0, self._first_token
        while segment in self.placed:
            segment, token = segment + 1, self.placed[segment]
        return token

    def violation(self, ready: Ready, opened: Opened) -> str:
        """Return why this READY is invalid as the next one, "" if it is valid. A READY that
        ended the prompt early would leave rows of another request in place."""
        slots, limit, until = self.source.slots, self.source.segment_tokens, ready.first_token
        if self.last:
            return f"segment {ready.segment} after the last one"
        if ready.segment != self.announced:
            return f"segment {ready.segment}, expected {self.announced}"
        if not (ready.segments or ready.last):
            return "no segment, and it is not the last READY"
        for one in ready.segments:
            until += one.count
            if one.slot >= slots or one.count > limit:
                return f"{one.count} tokens in slot {one.slot}; there are {slots}, of {limit} each"
        if ready.first_token != self.token or until > opened.end:
            return f"tokens {ready.first_token}..{until}, expected {self.token}..{opened.end}"
        if ready.last and until <= opened.end - opened.page_size:
            return f"the prompt's end at {until}, expected in the last page, before {opened.end}"
        return ""

    def accept(self, ready: Ready, request: Request, now: float) -> list[Segment]:
        found = []
        for one in ready.segments:
            number, peer = self.announced, self.source.peer
            found.append(Segment(request, self, peer, one, number, self.token, now))
            self.announced += 1
            self.token += one.count
        self.last = ready.last
        self.complete = self.last and len(self.placed) == self.announced
        return found


class Request:
    """One request on this rank. `transfers`: from the prefill ranks whose heads it reads.
    `segments`: the announced segments that are not yet in place, in order.

    Times on the machine's clock: `first_ready`; the target's arrival, `arrived`; the latest
    `progress`. `copying`: how many copies are in flight. `cold`: why the request is cold, or "".
    `decided`: the Verdict was issued, or is not needed any more. `limits`: times within which this
    rank finishes with a prefill rank's slot, at the smaller patience of the two.
    """

    def __init__(self, opened: Opened, heads: bool, times: Times, now: float) -> None:
        self.opened = opened
        patience = min([times.patience, *(source.patience for source in opened.sources)])
        self.limits = times if patience == times.patience else Times(patience)
        self.generation = opened.generation
        made = [SourceTransfer(s, opened.first_token) for s in opened.sources if heads and s.heads]
        self.transfers: dict[Peer, SourceTransfer] = {one.source.peer: one for one in made}
        self.segments: dict[Segment, None] = {}
        self.progress = now
        self.first_ready: float | None = None
        self.arrived: float | None = None
        self.copying = 0
        self.cold: Cold = ""
        self.decided = False

    @property
    def wants(self) -> bool:
        """Return whether segments are still to be read and copied."""
        return not (self.cold or self.decided)

    @property
    def placed_to(self) -> int:
        first = self.opened.first_token
        return min((transfer.placed_to for transfer in self.transfers.values()), default=first)

    def missing(self) -> list[Peer]:
        """Return the peers whose rows are not all in place."""
        return [peer for peer, transfer in self.transfers.items() if not transfer.complete]

    def waiting(self) -> list[Segment]:
        """Return the segments whose read has not started."""
        return [segment for segment in self.segments if segment.slot < 0]

    def message(self, source: Source, instance: bytes, slot_bytes: int) -> Open:
        """Make the OPEN to one prefill rank. `instance`, `slot_bytes`: facts of this rank."""
        opened, transfer = self.opened, self.transfers.get(source.peer)
        return Open(
            opened.version, opened.bootstrap_room, opened.generation, instance_of(source.peer),
            instance, source.readers,
            (transfer.source.heads.start, transfer.source.heads.stop) if transfer else (0, 0),
            opened.first_token, slot_bytes,
        )  # fmt: skip

    def failure(self, code: str, detail: str) -> Fail:
        """Make the FAIL after which a prefill rank sends no more of this request."""
        return fail(self.opened.bootstrap_room, self.generation, code, detail)

    def deadline(self, times: Times) -> float:
        """Return when the request goes cold; infinity until the target has arrived."""
        if self.arrived is None:
            return float("inf")
        took = 0.0 if self.first_ready is None else self.arrived - self.first_ready
        wait = min(max(3 * took, times.shortest_wait), times.longest_wait)
        return min(max(self.arrived, self.progress) + wait, self.arrived + times.whole_wait)


class RecentRooms:
    """Room numbers whose last request on this rank was not warm. Its OPEN may have been lost, so
    prefill could mistake the number's next OPEN for it, and send another request's KV. A warm
    request's OPEN did arrive. `seconds`: how long prefill retains an unmatched OPEN or sender."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[int, float] = {}  # the oldest first

    def is_ambiguous(self, number: int, now: float) -> bool:
        """Return whether prefill may mistake this request for an earlier one. Call it once."""
        since = self._since
        while since and now - since[oldest := next(iter(since))] > self._seconds:
            del since[oldest]
        ambiguous = since.pop(number, None) is not None
        since[number] = now
        return ambiguous

    def was_warm(self, number: int) -> None:
        self._since.pop(number, None)
