"""All worlds that can be reached."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.sim.exhaustive.values import State, Violation
from tests.sim.exhaustive.world import World


class Report(NamedTuple):
    worlds: tuple[int, ...]  # by number of disturbances
    steps: int
    seconds: float
    violation: str = ""
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{n:3}  {what}" for n, what in enumerate(self.path, 1)]
        return "\n".join([*lines, f"VIOLATION: {self.violation}"])


def search(new_world: Callable[[], World], disturbances: int, one_in: int = 1) -> Report:
    """All worlds that are reached with so many disturbances at most. `one_in`: of the worlds that
    a disturbance leads to at once, one in so many is gone on from."""
    report = Search(new_world(), disturbances, one_in).run()
    if not report.violation:
        return report
    return Search(new_world(), disturbances, one_in, ways={}).run()  # with the way to it


class Search:
    def __init__(
        self, world: World, disturbances: int, one_in: int, ways: dict[Any, Any] | None = None
    ) -> None:
        self._world, self._one_in, self._ways = world, one_in, ways
        self._seen: list[set[State]] = [set() for _ in range(disturbances + 1)]
        self._steps = 0

    def run(self) -> Report:
        began, problem, path = time.perf_counter(), "", ()
        try:
            self._layers()
        except Violation as violation:
            problem, path = str(violation), self._way()
        worlds = tuple(map(len, self._seen))
        return Report(worlds, self._steps, time.perf_counter() - began, problem, path)

    def _layers(self) -> None:
        later = {self._world.start()}
        for used, seen in enumerate(self._seen):
            fresh = [state for state in later if not self._is_seen(state)]
            seen.update(fresh)
            queue, later = deque(fresh), set()
            while queue:
                self._at = state = queue.popleft()
                for what, after in self._world.steps(state, used > 0):
                    self._steps += 1
                    if not self._is_seen(after):
                        seen.add(after)
                        queue.append(after)
                        self._note(state, what, after)
                if used + 1 < len(self._seen):
                    for what, after in self._world.disturbances(state):
                        self._steps += 1
                        chosen = hash(after) % self._one_in == 0
                        if chosen and after not in later and not self._is_seen(after):
                            later.add(after)
                            self._note(state, what, after)

    def _is_seen(self, state: State) -> bool:
        return any(state in seen for seen in self._seen)

    def _note(self, before: State, what: str, after: State) -> None:
        if self._ways is not None:
            self._ways.setdefault(after, (before, what))

    def _way(self) -> tuple[str, ...]:
        state, found = self._at, []
        while self._ways and state in self._ways:
            state, what = self._ways[state]
            found.append(what)
        return tuple(reversed(found))
