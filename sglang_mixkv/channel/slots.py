"""Slots of a rank's staging buffer: who uses which, and who gets the next one. No memory, no I/O.

    FREE --allocate--> ALLOCATED --publish--> PUBLISHED --acknowledge, expire--> FREE
                           +--------free----> FREE

On prefill a slot is allocated for packing, published with its READY, and free again with the ACK.
Without an ACK it is free `slot_aside` seconds later, when nothing can read it any more. On decode a
slot is allocated and published for a read, and free when its rows were copied out or nothing can
land in it.

An owner is a reader on prefill, and a prefill rank on decode. One owner cannot starve the others,
nor can many that are dead: docs/protocol.md, "Who gets a slot".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from typing import Generic, TypeVar

from sglang_mixkv.channel.times import Times

FEWEST, LARGEST, PAGE, LIST = 64, 4 << 20, 4096, 8

T = TypeVar("T")


def slots_of(staging_mb: int) -> tuple[int, int]:
    """Return how many slots a rank's staging buffer has, and the bytes of each: 4 MiB of rows, or
    less where 64 would not fit, and a page for the header, so that a chunk of 2^n tokens fills its
    slots exactly. A slot's other cost (a place in two messages, a read, a descriptor in two copies)
    does not depend on its size: slots are large, and more memory is more of them."""
    rows = min(LARGEST, (staging_mb << 20) // FEWEST)
    return (staging_mb << 20) // rows, rows + PAGE


def quota_of(count: int) -> int:
    """Return how many of `count` slots one owner holds at most."""
    return max(2, count // 2)


def list_of(count: int) -> int:
    """Return how many segments go into one READY or one read: a quarter of the quota at most, so
    that others are packed or read while these are acknowledged, and the wire does not stop."""
    return min(LIST, max(1, quota_of(count) // 4))


@lru_cache(1024)
def share_of(count: int, owners: int) -> int:
    """Return how many slots each of so many owners may hold. Its first may be one more."""
    return min(quota_of(count), (count - count // 4) // owners)


class SlotPool:
    """`count` equal slots. `held`: how many each owner has that has any. Times are the caller's."""

    def __init__(self, count: int, times: Times) -> None:
        self._times = times
        self._free = deque(range(count))
        self._owner: dict[int, Hashable] = {}
        self.held: Counter[Hashable] = Counter()
        self._published: dict[int, tuple[float, int]] = {}  # since when, stamp; the oldest first
        self._signs: tuple[dict[Hashable, float], ...] = {}, {}  # see `sign`; the oldest first
        self.barred: set[Hashable] = set()  # they get none
        self.count = count
        self._reserve = count // 4

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def available_for(self, owner: Hashable, owners: int) -> int:
        """Return how many slots this owner can have now, where so many hold or want some."""
        if owner in self.barred:
            return 0
        held, free = self.held.get(owner, 0), len(self._free)
        if free > self._reserve:
            return max(min(free - self._reserve, share_of(self.count, owners) - held), not held)
        return int(not held and free > self._kept_from(owner))

    def _kept_from(self, owner: Hashable) -> int:
        """Count the slots that stay free after this owner's first: an eighth, or a quarter of what
        it has not outlived. An owner that was heard and not served may not read what it gets."""
        heard, served = (signs.get(owner, float("-inf")) for signs in self._signs)
        published = [since for since, _ in self._published.values()]
        left = self.count - bisect_right(published, max(heard, served))
        kept = min(left // 4, self.count // 8)
        return kept if published and served >= published[0] else max(kept, self.count // 16)

    def sign(self, owner: Hashable, now: float, served: bool = False) -> None:
        """It lives. `served`: a slot was read; otherwise a message came, whose sender may be gone
        since then, with others that hold slots."""
        signs, when = self._signs[served], now if served else now - self._times.unsure
        oldest = next((since for since, _ in self._published.values()), float("inf"))
        while signs and signs[first := next(iter(signs))] < oldest:
            del signs[first]
        if when >= oldest:
            signs.pop(owner, None)
            signs[owner] = when

    def allocate(self, owner: Hashable) -> int:
        """Take one of the slots that are `available_for` the owner."""
        slot = self._free.popleft()
        self._owner[slot] = owner
        self.held[owner] += 1
        return slot

    def publish(self, slot: int, stamp: int, now: float) -> None:
        """Its READY goes out now, or a read into it begins."""
        assert slot in self._owner
        assert slot not in self._published
        self._published[slot] = now, stamp

    def acknowledge(self, slots: Iterable[tuple[int, int]], read: float | None = None) -> list[int]:
        """Free published slots of one owner; return those that are not published under their
        stamps. `read`: when the owner said that it read them, None if it cannot have."""
        owner, wrong = None, []
        for slot, stamp in slots:
            if self._published.get(slot, (None, None))[1] == stamp:
                owner = self._owner[slot]
                self.free(slot)
            else:
                wrong.append(slot)
        if read is not None and owner is not None:
            self.sign(owner, read, served=True)
        return wrong

    def free(self, slot: int) -> None:
        owner = self._owner.pop(slot)
        self._published.pop(slot, None)
        self.held[owner] -= 1
        if not self.held[owner]:
            del self.held[owner]
        self._free.append(slot)

    def expire(self, now: float) -> list[int]:
        """Free the slots whose ACK did not come within `slot_aside`."""
        limit = now - self._times.slot_aside
        found = [slot for slot, (since, _) in self._published.items() if since <= limit]
        for slot in found:
            self.free(slot)
        return found


class RoundRobin(Generic[T]):
    """Items that wait for slots: round-robin over owners, and over the items of each owner. An item
    gets up to `run` slots at once, which go into one message then. Items are compared by `==`, and
    an item that is added twice waits once. `owners`: those with an item, and their items."""

    def __init__(self, run: int = 1) -> None:
        self._run = run
        self.owners: dict[Hashable, dict[T, None]] = {}  # who waits longest is first

    def add(self, owner: Hashable, item: T) -> None:
        self.owners.setdefault(owner, {})[item] = None

    def remove(self, owner: Hashable, item: T) -> None:
        queue = self.owners.get(owner, {})
        queue.pop(item, None)
        if not queue:
            self.owners.pop(owner, None)

    def take(self, slots: SlotPool, limit: int) -> Iterator[tuple[T, int]]:
        """Yield up to `limit` items with a slot each, as far as there are slots. Each leaves; the
        caller adds it again where it wants another slot. In a round each owner gets an equal part
        of what is free, or what is available for it; one that gets none waits for the next call.
        """
        owners, limit = list(self.owners), min(limit, slots.free_slots)
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
