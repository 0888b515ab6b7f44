"""A decode room, and its parts: what it reads from each prefill rank."""

from __future__ import annotations

from sglang_mixkv.channel.messages import NO_SLOT, Open, Ready
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.events import OpenRoom, Source, instance_of


class Part:
    """What one prefill rank sends of a room.

    `segments`, `token`: the next that it may announce. `last`: it has announced all. `placed`:
    segments whose rows are in the pool, by number; the value is the token behind them.
    """

    def __init__(self, source: Source, first_token: int) -> None:
        self.source = source
        self.segments, self.token = 0, first_token
        self.last = False
        self.placed: dict[int, int] = {}
        self._first_token = first_token

    @property
    def has_rows(self) -> bool:
        return self.token > self._first_token

    @property
    def complete(self) -> bool:
        return self.last and len(self.placed) == self.segments

    @property
    def placed_to(self) -> int:
        """The rows of all tokens before this one are in place."""
        segment, token = 0, self._first_token
        while segment in self.placed:
            segment, token = segment + 1, self.placed[segment]
        return token

    def violation(self, ready: Ready, end: int) -> str:
        """Why this READY cannot be what a prefill rank sends next; "" if it can."""
        slots, limit = self.source.slots, self.source.segment_tokens
        if self.last:
            return f"segment {ready.segment} behind the last one"
        if ready.segment != self.segments:
            return f"segment {ready.segment} in the place of {self.segments}"
        if ready.first_token != self.token or ready.first_token + ready.count > end:
            until = ready.first_token + ready.count
            return f"tokens {ready.first_token}..{until} in the place of {self.token}..{end}"
        if ready.count and not (0 <= ready.slot < slots and ready.count <= limit):
            return f"{ready.count} tokens in slot {ready.slot}; there are {slots}, of {limit} each"
        if not ready.count and (not ready.last or ready.slot != NO_SLOT):
            return "a segment without tokens"
        return ""

    def accept(self, ready: Ready) -> None:
        self.segments += 1
        self.token += ready.count
        self.last = ready.last
        if not ready.count:
            self.placed[ready.segment] = self.token


class Room:
    """One request on this rank. `parts`: of the prefill ranks whose heads it reads.

    Times are the machine's clock: `first_ready`; `arrived`, the target's; `progress`, the last.
    `unpacking`: copies under way. `cold`: why it is cold, once it is. `known`: peers that have
    answered, and so have the OPEN.
    """

    def __init__(self, opened: OpenRoom, heads: bool, now: float) -> None:
        self.opened = opened
        self.generation = opened.generation
        self.pending = opened.pending
        sources = [source for source in opened.sources if source.heads] if heads else []
        self.parts = {source.peer: Part(source, opened.first_token) for source in sources}
        self.known: set[bytes] = set()
        self.progress = now
        self.first_ready: float | None = None
        self.arrived: float | None = None
        self.unpacking = 0
        self.cold = ""
        self.clearing = self.decided = self.closed = False

    @property
    def wants(self) -> bool:
        """Whether segments are still to be read and copied."""
        return not (self.cold or self.decided or self.closed)

    @property
    def complete(self) -> bool:
        return all(part.complete for part in self.parts.values())

    @property
    def placed_to(self) -> int:
        first = self.opened.first_token
        return min((part.placed_to for part in self.parts.values()), default=first)

    def missing(self) -> list[bytes]:
        """Peers whose rows are not all in place."""
        return [peer for peer, part in self.parts.items() if not part.complete]

    def message(self, source: Source, instance: bytes, slot_bytes: int) -> Open:
        """The OPEN for one prefill rank, of this instance with slots of that size."""
        event, part = self.opened, self.parts.get(source.peer)
        return Open(
            event.version, event.bootstrap_room, event.generation, instance_of(source.peer),
            instance, source.readers,
            (part.source.heads.start, part.source.heads.stop) if part else (0, 0),
            event.first_token, slot_bytes, event.checksum, source.is_send_target,
            event.required_targets, len(self.parts),
        )  # fmt: skip

    def deadline(self, times: Times) -> float:
        """When it goes cold; never before the target is here."""
        if self.arrived is None:
            return float("inf")
        took = 0.0 if self.first_ready is None else self.arrived - self.first_ready
        wait = min(max(3 * took, times.shortest_wait), times.longest_wait)
        return min(max(self.arrived, self.progress) + wait, self.arrived + times.whole_wait)
