"""Work of several owners that wait for slots, served fairly."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Owners take turns, and an owner's items do. An owner that has to wait for a slot costs one
    look, however many items it has, and none while there are no slots."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, dict[Hashable, T]] = {}
        self._added: dict[Hashable, None] = {}  # owners, since they were served last

    def add(self, owner: Hashable, key: Hashable, item: T) -> None:
        """Once, however often it is added."""
        self._queues.setdefault(owner, {})[key] = item
        self._added[owner] = None

    def remove(self, owner: Hashable, key: Hashable) -> None:
        queue = self._queues.get(owner, {})
        queue.pop(key, None)
        if not queue:
            self._queues.pop(owner, None)

    def serve(self, serve_one: Callable[[T], bool | None], has_slots: Callable[[], object]) -> None:
        """Until nothing can go on. `serve_one`: True, and there may be more; False, and the item
        needs nothing now; None, and its owner has to wait. `has_slots`: whether any is free; where
        none is, an item that needs none is served when it is added."""
        waiting = list(self._queues)
        while waiting and has_slots():
            again = []
            for owner in waiting:
                if not has_slots():
                    break
                if self._serve(owner, serve_one):
                    again.append(owner)
            waiting = again
        waiting, self._added = [] if has_slots() else list(self._added), {}
        while waiting:
            waiting = [owner for owner in waiting if self._serve(owner, serve_one)]

    def _serve(self, owner: Hashable, serve_one: Callable[[T], bool | None]) -> bool:
        queue = self._queues.get(owner)
        if not queue:
            return False
        key, item = next(iter(queue.items()))
        result = serve_one(item)
        if result is None:
            return False
        del self._queues[owner], queue[key]
        if result:
            queue[key] = item  # behind the owner's others
        if queue:
            self._queues[owner] = queue  # behind the other owners, the next time too
        return bool(queue)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
