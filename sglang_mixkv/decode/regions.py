"""Regions of one registered buffer, with a quarantine for regions that may still be written.

buffer   |  held  | free |  held  | quarantined until t |   free   |
"""

from __future__ import annotations

import threading
from itertools import pairwise

ALIGNMENT = 4096


class RegionAllocator:
    """First fit over [0, size), in bytes; safe to use from several threads.

    A region is in one state at a time: free, held, or quarantined (`retire`) until a
    moment that the caller names, after which `allocate` may hand it out again.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}  # start -> length
        self._retired: dict[int, float] = {}  # start -> when it is free; also in _held
        self._given = self._ended = 0  # regions, ever

    def allocate(self, length: int, now: float) -> int | None:
        """Start of a held region of at least `length` bytes; None when there is no room."""
        length = -(-max(length, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._reap(now)
            start = 0
            for held_start, held_length in sorted(self._held.items()):
                if held_start - start >= length:
                    break
                start = held_start + held_length
            if self.size - start < length:
                return None
            self._held[start] = length
            self._given += 1
            return start

    def free(self, start: int) -> None:
        """End a hold at once: no write to it can be in flight. Raises KeyError if not held."""
        with self._lock:
            if start in self._retired:
                raise KeyError(start)
            self._end(start)

    def retire(self, start: int, until: float) -> None:
        """End a hold, but keep the region out of use until then. KeyError if not held."""
        with self._lock:
            if start not in self._held or start in self._retired:
                raise KeyError(start)
            self._retired[start] = until

    def reclaim(self, start: int, until: float) -> None:
        """End that quarantine now: no write to the region can be in flight. Nothing happens when
        it has ended already, whatever the region is by then."""
        with self._lock:
            if self._retired.get(start) == until:
                self._end(start)

    def _reap(self, now: float) -> None:
        for start in [s for s, until in self._retired.items() if until <= now]:
            self._end(start)

    def _end(self, start: int) -> None:
        del self._held[start]
        self._retired.pop(start, None)
        self._ended += 1

    def in_use(self) -> tuple[int, int]:
        """Bytes held, and bytes quarantined."""
        with self._lock:
            retired = sum(self._held[start] for start in self._retired)
            return sum(self._held.values()) - retired, retired

    def problems(self) -> list[str]:
        """What is wrong with the books, at any moment."""
        with self._lock:
            held, retired = sorted(self._held.items()), set(self._retired)
            given, ended = self._given, self._ended
        found = []
        if given - ended != len(held):
            found.append(f"{given} regions given and {ended} ended, but {len(held)} are in use")
        for (start, length), (following, _) in pairwise([*held, (self.size, 0)]):
            if start + length > following:
                found.append(f"the region at {start} of {length} bytes reaches past {following}")
        if strays := retired - dict(held).keys():
            found.append(f"regions at {sorted(strays)} are in quarantine, but not in use")
        return found
