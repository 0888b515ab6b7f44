"""OPEN and FAIL messages that reach a prefill rank before the request that they belong to."""

from __future__ import annotations

from collections import Counter

from sglang_mixkv.prefill.events import Connection
from sglang_mixkv.prefill.transfer import NOBODY, Absent, Part

MAX_WAITING = 1 << 15
"""Room numbers that one connection may have used before their requests are here. A reader whose
clients hang up early leaves one with each, for the 600 s in which the request may still come: 54 a
second. Readers can be invented without end, so the connection counts."""
MAX_ALL = 1 << 17
"""Over all connections, of anybody with access to the port. Each takes some 500 bytes."""


class _Record:
    """What one reader did with one room number: it opened and `ended` so many requests that are
    not here yet, and then opened `part`. `last`: the last one that it ended.
    `connection`: whose place it takes."""

    __slots__ = ("connection", "ended", "last", "part", "since")

    def __init__(self, connection: Connection) -> None:
        self.connection, self.since = connection, 0.0
        self.ended, self.last = 0, NOBODY
        self.part: Part | None = None


class Waiting:
    """Parts that wait for their request, and requests that a reader has ended before they are here.
    These may still come, so that as many requests of that number are not for its next OPEN."""

    def __init__(self) -> None:
        self._records: dict[tuple[int, bytes], _Record] = {}  # the one touched longest ago first
        self._readers: dict[int, dict[bytes, None]] = {}  # by room number
        self._taken: Counter[Connection] = Counter()

    def __len__(self) -> int:
        return sum(bool(record.ended or record.part) for record in list(self._records.values()))

    def is_full(self, connection: Connection) -> bool:
        return self._taken[connection] >= MAX_WAITING or len(self._records) >= MAX_ALL

    def part(self, number: int, reader: bytes) -> Part | None:
        record = self._records.get((number, reader))
        return record.part if record is not None else None

    def generation(self, number: int, reader: bytes) -> int:
        """Of the reader's last OPEN or end; -1 without one."""
        record = self._records.get((number, reader))
        if record is None:
            return -1
        return record.part.opened.generation if record.part else record.last.generation

    def open(self, part: Part, now: float) -> None:
        self._touch(part.opened.room, part.reader, part.connection, now).part = part

    def end(
        self, number: int, reader: bytes, absent: Absent, connection: Connection, now: float
    ) -> None:
        """The reader has ended a request: that of its part, or of an OPEN that was lost."""
        record = self._touch(number, reader, connection, now)
        record.part, record.last = None, absent
        record.ended += 1

    def begin(self, number: int) -> tuple[dict[bytes, Absent], list[Part]]:
        """A request of this number is here: readers for which it has ended, and the parts of the
        others, the newest first. The caller puts back those that are for a later request."""
        absent, parts = {}, []
        for reader in list(self._readers.get(number, ())):
            record = self._records[number, reader]
            if record.ended:
                absent[reader] = record.last
                record.ended -= 1
            elif record.part is not None:
                parts.append((record.since, record.part))
                record.part = None
                if record.last is NOBODY:  # else each request would leave a record for 600 s
                    self._remove(number, reader)
        parts.sort(key=lambda one: -one[0])
        return absent, [part for _, part in parts]

    def expire(self, limit: float) -> list[Part]:
        """Forget what was touched at this time or before; the parts among it."""
        found = []
        for key, record in self._records.items():
            if record.since > limit:
                break
            found.append((key, record.part))
        for key, _ in found:
            self._remove(*key)
        return [part for _, part in found if part is not None]

    def _touch(self, number: int, reader: bytes, connection: Connection, now: float) -> _Record:
        record = self._records.pop((number, reader), None)
        if record is None:
            record = _Record(connection)
            self._taken[connection] += 1
            self._readers.setdefault(number, {})[reader] = None
        record.since = now
        self._records[number, reader] = record
        return record

    def _remove(self, number: int, reader: bytes) -> None:
        connection = self._records.pop((number, reader)).connection
        self._taken[connection] -= 1
        if not self._taken[connection]:
            del self._taken[connection]
        del self._readers[number][reader]
        if not self._readers[number]:
            del self._readers[number]
