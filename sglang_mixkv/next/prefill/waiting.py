"""Parts of a prefill rank without a room: their request is not here."""

from __future__ import annotations

from collections import Counter

from sglang_mixkv.next.prefill.parts import Part

MAX_WAITING = 4096  # rooms that one reader may open before their requests are here


class Queue:
    """At most one part for each room number and reader, the oldest first."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, bytes], Part] = {}
        self._count: Counter[bytes] = Counter()
        self._readers: dict[int, set[bytes]] = {}  # by room number

    def __len__(self) -> int:
        return len(self._parts)

    def has(self, number: int) -> bool:
        return number in self._readers

    def get(self, number: int, reader: bytes) -> Part | None:
        return self._parts.get((number, reader))

    def is_full(self, reader: bytes) -> bool:
        return self._count[reader] >= MAX_WAITING

    def put(self, part: Part) -> None:
        """In the place of an earlier one of the same room and reader."""
        self.remove(part)
        self._parts[part.opened.room, part.reader] = part
        self._count[part.reader] += 1
        self._readers.setdefault(part.opened.room, set()).add(part.reader)

    def remove(self, part: Part) -> None:
        """It, or the one in its place."""
        number, reader = part.opened.room, part.reader
        if self._parts.pop((number, reader), None) is None:
            return
        self._count -= Counter([reader])
        self._readers[number].discard(reader)
        if not self._readers[number]:
            del self._readers[number]

    def take(self, number: int) -> list[Part]:
        """All parts of a room number, which leave; the newest first."""
        found = [self._parts[number, reader] for reader in sorted(self._readers.get(number, ()))]
        found.sort(key=lambda part: -part.since)
        for part in found:
            self.remove(part)
        return found

    def take_older(self, limit: float) -> list[Part]:
        """All parts that wait since this time or longer, which leave."""
        found = []
        for part in self._parts.values():
            if part.since > limit:
                break
            found.append(part)
        for part in found:
            self.remove(part)
        return found


class Waiting:
    """`early`: parts that are to be served. `gone`: parts that ended while they waited. They wait
    on for a time, since their request may still come: the reader's next OPEN of the same number is
    for the request after that one."""

    def __init__(self) -> None:
        self.early, self.gone = Queue(), Queue()

    def __len__(self) -> int:
        return len(self.early) + len(self.gone)

    def end(self, part: Part, now: float) -> list[Part]:
        """This one has ended, waiting or not. Returns those that nothing knows any more."""
        number, reader = part.opened.room, part.reader
        if self.early.get(number, reader) is not part:
            return []
        self.early.remove(part)
        forgotten = [former] if (former := self.gone.get(number, reader)) else []
        part.since = now
        self.gone.put(part)
        if self.gone.is_full(reader):
            self.gone.remove(part)
            forgotten.append(part)
        return forgotten
