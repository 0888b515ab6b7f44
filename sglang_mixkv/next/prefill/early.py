"""OPENs of a prefill rank whose request is not here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sglang_mixkv.next.prefill.parts import Part

MAX_EARLY = 4096  # rooms that one reader may open before their requests are here


class Early:
    """Parts without a room, at most one for each room number and reader, the oldest first."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, bytes], Part] = {}
        self._count: Counter[bytes] = Counter()
        self._readers: dict[int, set[bytes]] = {}  # by room number

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._parts.values()))

    def get(self, number: int, reader: bytes) -> Part | None:
        return self._parts.get((number, reader))

    def is_full(self, reader: bytes) -> bool:
        return self._count[reader] >= MAX_EARLY

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
        """All parts of a room number, which leave."""
        found = [self._parts[number, reader] for reader in sorted(self._readers.get(number, ()))]
        for part in found:
            self.remove(part)
        return found
