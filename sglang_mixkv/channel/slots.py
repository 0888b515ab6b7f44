"""Slots of a rank's staging buffer: which owner holds each, and which gets the next. No I/O.

    FREE --allocate--> ALLOCATED --publish--> PUBLISHED --acknowledge, expire--> FREE
                           +--------free----> FREE

On prefill, a slot is allocated for packing, published with its READY, and freed by the ACK, or
`slot_aside` seconds later, when nothing can read it any more. On decode, a slot is allocated and
published for a read, and freed once its rows are copied out or nothing can land in it any more.

An owner is a reader on prefill, and a prefill rank on decode. Neither one owner nor many dead ones
can starve the others: see docs/protocol.md, "Who gets a slot".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from typing import Generic, TypeVar

from sglang_mixkv.channel.times import Times

FEWEST, LARGEST, PAGE, LIST = 64, 4 << 20, 4096, 8
MOST = 1024  # reads in flight per peer; above this, some fail over Mooncake's TCP

T = TypeVar("T")


def slots_of(staging_mb: int) -> tuple[int, int]:
    """Return how many slots a rank's staging buffer has, and the bytes of each: 4 MiB of rows (less
    if 64 would not fit) and a page for the header, so that a chunk of 2^n tokens fills its slots
    exactly. A slot's other costs (a place in two messages, a read, a descriptor in two copies) do
    not depend on its size, so slots are large, and more memory adds slots rather than size."""
    rows = min(LARGEST, (staging_mb << 20) // FEWEST)
    return (staging_mb << 20) // rows, rows + PAGE


def quota_of(count: int) -> int:
    """Return how many of `count` slots one owner may hold."""
    return max(2, min(count // 2, MOST))


def list_of(count: int) -> int:
    """Return how many segments one READY or one read may have: at most a quarter of the quota, so
    that others are packed or read while these are acknowledged, and the wire never idles."""
    return min(LIST, max(1, quota_of(count) // 4))


@lru_cache(1024)
def share_of(count: int, owners: int) -> int:
    """Return each owner's share of `count` slots. An owner without a slot may get one beyond it."""
    return min(quota_of(count), (count - count // 4) // owners)


class SlotPool:
    """A pool of `count` equal slots. `free_slots`: the next to allocate is first. `held`: how many
    slots each owner holds. Callers pass the time."""

    def __init__(self, count: int, times: Times) -> None:
        self._times = times
        self.free_slots = deque(range(count))
        self._owner: dict[int, Hashable] = {}
        self.held: Counter[Hashable] = Counter()
        self._published: dict[int, tuple[float, int]] = {}  # since when, stamp; oldest first
        self._signs: tuple[dict[Hashable, float], ...] = {}, {}  # see `sign`; oldest first
        self.barred: set[Hashable] = set()  # owners that get no slots
        self.count = count
        self._reserve = count // 4

    def available_for(self, owner: Hashable, owners: int) -> int:
        """Return how many slots this owner can get now, if `owners` of them hold or need some."""
        if owner in self.barred:
            return 0
        held, free = self.held.get(owner, 0), len(self.free_slots)
        if free > self._reserve:
            return max(min(free - self._reserve, share_of(self.count, owners) - held), not held)
        return int(not held and free > self._kept_from(owner))

    def _kept_from(self, owner: Hashable) -> int:
        """Return how many slots must stay free after this owner gets its first slot: a quarter of
        the slots not published before its last sign of life, and at most an eighth of all. If the
        owner has read no slot, and may never read one, at least a sixteenth must stay free."""
        heard, served = (signs.get(owner, float("-inf")) for signs in self._signs)
        published = [since for since, _ in self._published.values()]
        left = self.count - bisect_right(published, max(heard, served))
        kept = min(left // 4, self.count // 8)
        return kept if published and served >= published[0] else max(kept, self.count // 16)

    def sign(self, owner: Hashable, now: float, served: bool = False) -> None:
        """Record that an owner is alive. `served`: it has read a slot. Otherwise it only sent a
        message; it may have died since, like other owners that hold slots."""
        if not self._published:
            return  # signs matter only while slots are published
        signs, when = self._signs[served], now if served else now - self._times.unsure
        oldest, _ = next(iter(self._published.values()))
        while signs and signs[first := next(iter(signs))] < oldest:
            del signs[first]
        if when >= oldest:
            signs.pop(owner, None)
            signs[owner] = when

    def allocate(self, owner: Hashable) -> int:
        """Give the owner one of the slots that are `available_for` it."""
        slot = self.free_slots.popleft()
        self._owner[slot] = owner
        self.held[owner] += 1
        return slot

    def publish(self, slot: int, stamp: int, now: float) -> None:
        """Publish a slot: its READY goes out now, or a read into it begins."""
        assert slot in self._owner
        assert slot not in self._published
        self._published[slot] = now, stamp

    def acknowledge(self, slots: Iterable[tuple[int, int]], read: float | None = None) -> list[int]:
        """Free published slots of one owner; return those not published under their stamps. `read`:
        when the owner reported that it had read them; None if it cannot have read them."""
        owner, wrong = None, []
        for slot, stamp in slots:
            if self._published.get(slot, (None, None))[1] == stamp:
                owner = self.free(slot)
            else:
                wrong.append(slot)
        if read is not None and owner is not None:
            self.sign(owner, read, served=True)
        return wrong

    def free(self, slot: int) -> Hashable:
        """Free a slot; return its owner."""
        owner = self._owner.pop(slot)
        self._published.pop(slot, None)
        self.held[owner] -= 1
        if not self.held[owner]:
            del self.held[owner]
        self.free_slots.append(slot)
        return owner

    def expire(self, now: float) -> list[int]:
        """Free and return the slots whose ACK did not come within `slot_aside`."""
        limit = now - self._times.slot_aside
        found = [slot for slot, (since, _) in self._published.items() if since <= limit]
        for slot in found:
            self.free(slot)
        return found


class RoundRobin(Generic[T]):
    """A queue of items that need slots, round-robin over owners, and over each owner's items. An
    item gets up to `run` slots in a row, which then share a message. Items are compared by `==`,
    and an item that is added twice is queued once. `owners`: those with items, and their items."""

    def __init__(self, run: int = 1) -> None:
        self._run = run
        self.owners: dict[Hashable, dict[T, None]] = {}  # the longest-waiting is first

    def add(self, owner: Hashable, item: T) -> None:
        self.owners.setdefault(owner, {})[item] = None

    def remove(self, owner: Hashable, item: T) -> None:
        queue = self.owners.get(owner, {})
        queue.pop(item, None)
        if not queue:
            self.owners.pop(owner, None)

    def take(self, slots: SlotPool, limit: int) -> Iterator[tuple[T, int]]:
        """Yield up to `limit` items with a slot each, while slots last. A yielded item leaves the
        queue; the caller adds it again if it needs another slot. In each round, an owner gets an
        equal part of the free slots, or fewer if fewer are available for it; an owner that gets
        none waits for the next call."""
        owners, limit = list(self.owners), min(limit, len(slots.free_slots))
        contend = len({*owners, *slots.held})
        while owners and limit > 0:
            part, again = max(1, limit // len(owners)), list[Hashable]()
            for owner in owners:
                given = min(part, limit, slots.available_for(owner, contend))
                if not given:
                    continue
                queue, item, left = self.owners[owner], None, 0
                while given and queue:
                    if not left or item not in queue:
                        item, left = next(iter(queue)), self._run
                    del queue[item]
                    given, limit, left = given - 1, limit - 1, left - 1
                    yield item, slots.allocate(owner)
                del self.owners[owner]
                if queue:
                    self.owners[owner] = queue  # after the other owners
                    again.append(owner)
            owners = again
