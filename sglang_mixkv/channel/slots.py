"""Who uses which slot of a rank's staging buffer, and who gets the next one. No memory, no I/O.

    FREE --take--> TAKEN --offer--> OFFERED --acknowledge, expire--> FREE
                     +----free----> FREE

On prefill a slot is taken to be packed, offered with its READY, and free again with the ACK.
Without an ACK it is free `slot_aside` seconds later, when nothing can read it any more. On decode a
slot is taken for a read, and free when its rows were copied out or nothing can land in it.

An owner is a reader on prefill, and a prefill rank on decode. One owner cannot starve the others:
it holds a quarter of the slots at most, and no more than an equal share of three quarters among the
owners that hold any, since they may be the ranks of one server that is gone; the last quarter goes
to owners that hold none. While a slot of an owner is late, it gets one other slot at a time. An ACK
that is lost with its connection makes a slot late, and no more than that: its reader goes on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from sglang_mixkv.channel.times import Times

SLOTS = 64
# What a slot costs beside its bytes (its place in a message each way, a read, a copy's descriptor
# on both sides) is the same for any size, so slots are large: 4 MiB of rows, by default.
ALIGNMENT = 4096

T = TypeVar("T")


def slot_bytes(staging_mb: int) -> int:
    """Bytes of each slot of a rank's staging buffer: its share, and one page for the header, so
    that chunks of a power of two fill slots and leave no rest for another."""
    return (staging_mb << 20) // SLOTS // ALIGNMENT * ALIGNMENT + ALIGNMENT


def quota_of(count: int) -> int:
    """How many of `count` slots one owner holds at most."""
    return max(2, count // 4)


def list_of(count: int) -> int:
    """How many segments go into one READY, and into one read: half of the quota, so that the other
    half is packed or read while these are acknowledged."""
    return quota_of(count) // 2


def share_of(count: int, owners: int) -> int:
    """How many each of so many owners may hold."""
    return max(1, min(quota_of(count), (count - count // 4) // owners))


class SlotPool:
    """`count` equal slots. Times are those of the caller's clock, in seconds."""

    def __init__(self, count: int, times: Times) -> None:
        if count < 2:
            raise ValueError(f"{count} slots: at least two are needed")
        self._times = times
        self._free = deque(range(count))
        self._owner: dict[int, Hashable] = {}
        self._held: Counter[Hashable] = Counter()
        self._offered: dict[int, tuple[float, int]] = {}  # since when, stamp; the oldest first
        self.count = count
        self._reserve = count // 4

    @property
    def offered(self) -> int:
        return len(self._offered)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self, owner: Hashable, now: float) -> int | None:
        """A slot, or None where this owner has to wait."""
        held, free = self._held.get(owner, 0), len(self._free)
        if not free:
            return None
        if held and (free <= self._reserve or held >= share_of(self.count, len(self._held))):
            return None
        if held and self._offered:
            late = self._late(owner, now)
            if late and held > late:
                return None
        slot = self._free.popleft()
        self._owner[slot] = owner
        self._held[owner] = held + 1
        return slot

    def offer(self, slot: int, stamp: int, now: float) -> None:
        """Its READY goes out now: its owner may read it from here on."""
        assert slot in self._owner
        assert slot not in self._offered
        self._offered[slot] = now, stamp

    def acknowledge(self, slot: int, stamp: int) -> bool:
        """Free an offered slot; False where it is not offered under this stamp."""
        if self._offered.get(slot, (0.0, None))[1] != stamp:
            return False
        self.free(slot)
        return True

    def free(self, slot: int) -> None:
        owner = self._owner.pop(slot)
        self._offered.pop(slot, None)
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._free.append(slot)

    def expire(self, now: float) -> list[int]:
        """Free the slots whose ACK did not come within `slot_aside`."""
        limit = now - self._times.slot_aside
        found = [slot for slot, (since, _) in self._offered.items() if since <= limit]
        for slot in found:
            self.free(slot)
        return found

    def _late(self, owner: Hashable, now: float) -> int:
        """How many slots of this owner are late."""
        limit, late = now - self._times.late_ack, 0
        for slot, (since, _) in self._offered.items():
            if since > limit:
                break
            late += self._owner[slot] == owner
        return late


class RoundRobin(Generic[T]):
    """Items that wait for slots: round-robin over owners, and over the items of each owner.
    Items are compared by `==`, and an item that is added twice waits once. `owners`: those with
    an item, and their items."""

    def __init__(self) -> None:
        self.owners: dict[Hashable, dict[T, None]] = {}  # who waits longest is first

    def add(self, owner: Hashable, item: T) -> None:
        self.owners.setdefault(owner, {})[item] = None

    def remove(self, owner: Hashable, item: T) -> None:
        queue = self.owners.get(owner, {})
        queue.pop(item, None)
        if not queue:
            self.owners.pop(owner, None)

    def take(self, slots: SlotPool, now: float, most: int) -> Iterator[tuple[T, int]]:
        """`most` items with a slot each, or as many as there are slots for. Each leaves; the caller
        adds it again, behind its owner's others, where it wants another slot. An owner that has to
        wait is asked once, and nobody is while no slot is free."""
        owners = list(self.owners)
        while owners:
            again = []
            for owner in owners:
                if not (most and slots._free):
                    return
                slot = slots.take(owner, now)
                if slot is None:
                    continue
                most -= 1
                queue = self.owners.pop(owner)
                item = next(iter(queue))
                del queue[item]
                if queue:
                    self.owners[owner] = queue  # behind the other owners
                yield item, slot
                if owner in self.owners:
                    again.append(owner)
            owners = again

    def __len__(self) -> int:
        return sum(map(len, self.owners.values()))
