"""What a prefill rank knows of requests that are not here: parts, and which have ended."""

from __future__ import annotations

from collections import Counter

from sglang_mixkv.prefill.events import Connection
from sglang_mixkv.prefill.parts import NOBODY, Absent, Part

MAX_WAITING = 4096  # rooms that one connection may open before their requests are here
MAX_ALL = 1 << 16  # over all connections, of anybody with access to the port
# The end of a request that is not here is remembered as long as the request may come, for 600 s.
# It takes some 300 bytes, and a reader whose clients hang up early has one after the other.
MAX_ENDED = 1 << 16  # of one connection: 109 hang-ups a second
MAX_ALL_ENDED = 1 << 18


class Places:
    """How many are taken, by connection: a reader has one at a time, and readers can be invented
    without end."""

    def __init__(self, most: int, most_in_all: int) -> None:
        self._taken: Counter[Connection] = Counter()
        self._most, self._most_in_all = most, most_in_all
        self._all = 0

    def is_full(self, connection: Connection) -> bool:
        return self._taken[connection] >= self._most or self._all >= self._most_in_all

    def take(self, connection: Connection) -> None:
        self._taken[connection] += 1
        self._all += 1

    def free(self, connection: Connection) -> None:
        self._all -= 1
        self._taken[connection] -= 1
        if not self._taken[connection]:
            del self._taken[connection]


class Queue:
    """At most one part for each room number and reader, the oldest first."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, bytes], Part] = {}
        self._readers: dict[int, set[bytes]] = {}  # by room number
        self._places = Places(MAX_WAITING, MAX_ALL)
        self.is_full = self._places.is_full

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, bootstrap_room: int, reader: bytes) -> Part | None:
        return self._parts.get((bootstrap_room, reader))

    def put(self, part: Part) -> None:
        """In the place of an earlier one of the same room and reader."""
        self.remove(part)
        self._parts[part.opened.room, part.reader] = part
        self._places.take(part.connection)
        self._readers.setdefault(part.opened.room, set()).add(part.reader)

    def remove(self, part: Part) -> None:
        """It, or the one in its place."""
        bootstrap_room, reader = part.opened.room, part.reader
        found = self._parts.pop((bootstrap_room, reader), None)
        if found is None:
            return
        self._places.free(found.connection)
        self._readers[bootstrap_room].discard(reader)
        if not self._readers[bootstrap_room]:
            del self._readers[bootstrap_room]

    def take(self, bootstrap_room: int) -> list[Part]:
        """All parts of a room number, which leave; the newest first."""
        found = [
            self._parts[bootstrap_room, reader]
            for reader in sorted(self._readers.get(bootstrap_room, ()))
        ]
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


class _Record:
    """`count` requests have ended at the reader; `last`: the last of them. `connection`: whose
    place it takes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.count, self.last, self.since = 0, NOBODY, 0.0


class Ended:
    """Requests that a reader has ended before they are here, by room number and reader.

    They may still come: so many requests of that number are not for the reader's next OPEN.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[int, bytes], _Record] = {}  # the oldest first
        self._readers: dict[int, set[bytes]] = {}
        self._places = Places(MAX_ENDED, MAX_ALL_ENDED)
        self.is_full = self._places.is_full

    def __len__(self) -> int:
        return len(self._records)

    def generation(self, bootstrap_room: int, reader: bytes) -> int:
        """Of the last request that has ended; -1 without one."""
        record = self._records.get((bootstrap_room, reader))
        return record.last.generation if record is not None else -1

    def note(
        self, bootstrap_room: int, reader: bytes, absent: Absent, connection: Connection, now: float
    ) -> None:
        """One more."""
        key = bootstrap_room, reader
        if key not in self._records:
            self._records[key] = _Record(connection)
            self._places.take(connection)
            self._readers.setdefault(bootstrap_room, set()).add(reader)
        record = self._records[key]
        record.count += 1
        record.last = absent
        self.touch(bootstrap_room, reader, now)

    def touch(self, bootstrap_room: int, reader: bytes, now: float) -> None:
        """A record is known for as long as the OPEN that waits behind it."""
        record = self._records.pop((bootstrap_room, reader), None)
        if record is not None:
            record.since = now
            self._records[bootstrap_room, reader] = record

    def take(self, bootstrap_room: int) -> dict[bytes, Absent]:
        """A request of this number is here: the readers for which it has ended."""
        found = {}
        for reader in list(self._readers.get(bootstrap_room, ())):
            record = self._records[bootstrap_room, reader]
            found[reader] = record.last
            record.count -= 1
            if not record.count:
                self._remove(bootstrap_room, reader)
        return found

    def expire(self, limit: float) -> None:
        """Forget what was touched at this time or before."""
        found = []
        for key, record in self._records.items():
            if record.since > limit:
                break
            found.append(key)
        for key in found:
            self._remove(*key)

    def _remove(self, bootstrap_room: int, reader: bytes) -> None:
        self._places.free(self._records.pop((bootstrap_room, reader)).connection)
        self._readers[bootstrap_room].discard(reader)
        if not self._readers[bootstrap_room]:
            del self._readers[bootstrap_room]
