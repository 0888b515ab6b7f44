"""All segments of a decode rank, while they wait for slots, are read, and are copied to the pool.

A segment is acknowledged once: when its read has ended, or when it is dropped unread. Its local
slot is freed once its rows are in place, or never will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from sglang_mixkv.channel.actions import Send, StartCopies
from sglang_mixkv.channel.messages import MAX_LIST, Ack, Announced
from sglang_mixkv.channel.slots import RoundRobin, SlotPool, list_of
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.transfer import Peer, Request, Segment, SourceTransfer

Job = Segment | act.Clear


class Segments:
    def __init__(self, slots: SlotPool) -> None:
        self._slots, self._list = slots, list_of(slots.count)
        self._turns: RoundRobin[Segment] = RoundRobin()
        self._reads: dict[act.StartRead, None] = {}  # in flight
        self.copying: set[Job] = set()
        self._jobs: list[Job] = []  # copies not yet requested
        self._acks: dict[Peer, list[tuple[int, int]]] = {}
        self._delayed: dict[Hashable, float] = {}  # when this rank last delayed each peer

    def add(self, segment: Segment) -> None:
        segment.request.segments[segment] = None
        self._turns.add(segment.peer, segment)

    def remove(self, segment: Segment) -> None:
        """Forget a segment, in place or given up. Free its slot; acknowledge it if not read."""
        del segment.request.segments[segment]
        if segment.slot < 0:
            self._turns.remove(segment.peer, segment)
            self.acknowledge(segment.peer, [segment.announced])
        else:
            self._slots.free(segment.slot)

    def drop(self, request: Request) -> None:
        """Remove the waiting segments of a request that no longer needs them."""
        for segment in request.waiting():
            self.remove(segment)

    def acknowledge(self, peer: Peer, announced: Iterable[Announced]) -> None:
        acks = self._acks.setdefault(peer, [])
        for one in announced:
            acks.append((one.slot, one.stamp))

    def actions(self, now: float) -> list[act.Action]:
        """Return ACKs, reads of the waiting segments that get a slot, and copies."""
        found: list[act.Action] = []
        for peer, slots in self._acks.items():
            for first in range(0, len(slots), MAX_LIST):
                found.append(Send(peer, Ack(tuple(slots[first : first + MAX_LIST]))))
        self._acks = {}
        if self._turns.owners:
            transfers: dict[SourceTransfer, list[Segment]] = {}
            for segment, slot in self._turns.take(self._slots, self._slots.count):
                segment.slot = slot
                transfers.setdefault(segment.transfer, []).append(segment)
            for segments in transfers.values():
                for first in range(0, len(segments), self._list):
                    some = segments[first : first + self._list]
                    for one in some:
                        self._slots.publish(one.slot, one.announced.stamp, now)
                    read = act.StartRead(some[0].peer, some, now, now + some[0].request.limits.read)
                    self._reads[read] = None
                    found.append(read)
        if self._jobs:
            found.append(StartCopies(tuple(self._jobs)))
            self._jobs = []
        return found

    def end_read(self, read: act.StartRead, now: float, error: str) -> None:
        """End a read and acknowledge its segments."""
        del self._reads[read]
        self.acknowledge(read.peer, [segment.announced for segment in read.segments])
        if self._slots.barred:
            self._slots.barred = {one.peer for one in self._reads if one.failed}
        if not error:
            self._slots.sign(read.peer, now, served=True)

    def overdue(self, now: float) -> list[act.StartRead]:
        """Return overdue reads that have not failed yet. Until they end, the peers get no slot."""
        found = [one for one in self._reads if one.until <= now and not one.failed]
        self._slots.barred.update(read.peer for read in found)
        return found

    def note_delays(self, now: float, since: float) -> None:
        """Record the peers that this rank delays, because segments from them wait here for a slot,
        a forward or a copy. Drop records from before `since`."""
        reading = Counter[Hashable](read.peer for read in self._reads for _ in read.segments)
        here = dict.fromkeys((*self._turns.owners, *(self._slots.held - reading)), now)
        recent = {peer: when for peer, when in self._delayed.items() if when > since}
        self._delayed = recent | here

    def late(self, request: Request, since: float) -> list[Peer]:
        """Return the peers to blame for missing rows: peers that this rank has not delayed since
        `since`, and peers with a read that began earlier. A peer whose slots all wait for this rank
        cannot announce segments of any request."""
        reading = {read.peer for read in self._reads if read.began <= since}
        spared = self._delayed.keys() - reading
        return [peer for peer in request.missing() if peer not in spared]

    def not_read(self, peer: Peer, announced: Iterable[Announced]) -> list[Announced]:
        """Return the announced segments that no read in flight covers."""
        reads = [read for read in self._reads if read.peer == peer]
        stamps = {segment.announced.stamp for read in reads for segment in read.segments}
        return [one for one in announced if one.stamp not in stamps]

    def copy(self, request: Request, jobs: Sequence[Job]) -> None:
        """Queue a request's copies: segments from their slots to the pool, or zeros."""
        self.copying.update(jobs)
        self._jobs += jobs
        request.copying += len(jobs)
