"""Virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush


class Clock:
    """Calls in the order of their time, and of their making where that is equal."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self._heap: list[tuple] = []
        self._made = 0

    def at(self, when: float, call: Callable, *args: object) -> None:
        self._made += 1
        heappush(self._heap, (when, self._made, call, args))

    def after(self, delay: float, call: Callable, *args: object) -> None:
        self._made += 1
        heappush(self._heap, (self.now + delay, self._made, call, args))

    def run(self, limit: float) -> bool:
        """True once nothing is left to do; False where that was not before `limit`."""
        heap = self._heap
        while heap:
            if heap[0][0] > limit:
                return False
            self.now, _, call, args = heappop(heap)
            call(*args)
        return True
