"""The tables of a rank as they were: put back, and compared, without a list of their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MISSING = object()


class Tables:
    """Copies of these objects' attributes, and of all dicts, lists and sets among them, at any
    depth. A record inside, such as a room, counts as a dict of its fields."""

    def __init__(self, *owners: Any) -> None:
        self._tables: dict[int, Table] = {}
        for owner in owners:
            self._tables[id(vars(owner))] = Table(vars(owner))
            for value in vars(owner).values():
                if isinstance(value, dict | list | set):
                    self._keep(value)

    def _keep(self, value: Any) -> Table:
        if id(value) in self._tables:
            return self._tables[id(value)]
        table = self._tables[id(value)] = Table(value)
        for key, inside in value.items() if isinstance(value, dict) else ():
            inner = _inner(inside)
            if inner is not None:
                table.inner[key] = self._keep(inner)
        return table

    def put_back(self) -> None:
        for table in self._tables.values():
            table.put_back()

    def changed(self, keys: Iterable[Any]) -> list[str]:
        """What differs under these keys, in any of the tables."""
        return [
            f"{key}: {line}"
            for table in self._tables.values()
            for key in keys
            if table.has(key)
            for line in table.changed_under(key)
        ]


class Table:
    """A dict, list or set, and a copy of it. `inner`: tables in a dict, by key."""

    def __init__(self, now: Any) -> None:
        self._now, self._before = now, now.copy()
        self.inner: dict[Any, Table] = {}

    def put_back(self) -> None:
        """Threads may read meanwhile: what stays is there all the time."""
        now, before = self._now, self._before
        if isinstance(now, list):
            now[:] = before
        elif isinstance(now, set):
            now.intersection_update(before)
            now.update(before)
        else:
            if len(now) != len(before) or now.keys() != before.keys():
                for key in now.keys() - before.keys():
                    del now[key]
            now.update(before)

    def has(self, key: Any) -> bool:
        """Whether the key stands in it, or stood."""
        return not isinstance(self._now, list) and (key in self._now or key in self._before)

    def changed_under(self, key: Any) -> Iterator[str]:
        now, before = self._now, self._before
        if isinstance(now, set):
            if (key in now) != (key in before):
                yield f"in {before!r}, which is now {now!r}"
            return
        one, other = now.get(key, MISSING), before.get(key, MISSING)
        if one is not other and not (_plain(one) and one == other):
            yield f"{other!r} is now {one!r}"
        elif key in self.inner:
            yield from self.inner[key].changed()

    def changed(self) -> Iterator[str]:
        """What differs anywhere in it."""
        now, before = self._now, self._before
        if not isinstance(now, dict):
            if now != before:
                yield f"{before!r} is now {now!r}"
            return
        for key in {*now, *before}:
            if now.get(key, MISSING) is not before.get(key, MISSING):
                yield from self.changed_under(key)
        for table in self.inner.values():
            yield from table.changed()


def _inner(value: Any) -> Any:
    """Where a value keeps what can change of it; None for a value that cannot."""
    if isinstance(value, dict | list | set):
        return value
    record = getattr(value, "__dataclass_params__", None)
    return None if record is None or record.frozen or isinstance(value, type) else vars(value)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)
