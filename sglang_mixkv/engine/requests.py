"""How well decode drafts, by how each request's drafter began: warm, cold, or retracted.

SGLang counts a request's verify rounds by accepted drafts in a list of the request
(Req.spec_correct_drafts_histogram). This module holds that list and a weak reference to the
request: once it has finished, or is gone, the list is final. Nothing is asked of SGLang's steps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

RETRACTED = "retracted"
MAX_WATCHED = 65536


class _Watched:
    def __init__(self, request: Any, histogram: list[int], state: str) -> None:
        self.request, self.histogram, self.state = weakref.ref(request), histogram, state

    @property
    def has_ended(self) -> bool:
        request = self.request()
        return request is None or request.finished()


class Requests:
    """`count`: takes the state and the histogram of each request that has ended. `begin` and
    `retract` are the scheduler's, `settle` is one other thread's."""

    def __init__(self, count: Callable[[str, list[int]], None]) -> None:
        self._count = count
        self._new: deque[tuple[str, _Watched | None]] = deque(maxlen=MAX_WATCHED)
        self._watched: dict[str, _Watched] = {}

    def begin(self, request: Any, state: str) -> None:
        """Its KV is in place. One that begins twice was retracted and prefilled again."""
        histogram = getattr(request, "spec_correct_drafts_histogram", None)
        if histogram is not None:
            self._new.append((request.rid, _Watched(request, histogram, state)))

    def retract(self, request: Any) -> None:
        self._new.append((request.rid, None))

    def settle(self) -> None:
        """Count those that have ended."""
        while self._new:
            rid, begun = self._new.popleft()
            known = self._watched.get(rid)
            if known is not None:
                known.state = RETRACTED
            elif begun is not None and len(self._watched) < MAX_WATCHED:
                self._watched[rid] = begun
        for rid, one in list(self._watched.items()):
            if one.has_ended:
                del self._watched[rid]
                self._count(one.state, one.histogram)

    def __len__(self) -> int:
        return len(self._new) + len(self._watched)
