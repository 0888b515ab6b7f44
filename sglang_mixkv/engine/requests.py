"""How well decode drafts, by how each request's drafter began: warm, cold and why, or retracted.

SGLang counts a request's verify rounds by accepted drafts in a list of the request
(Req.spec_correct_drafts_histogram). This module holds that list and a weak reference to the
request: once it has finished, or is gone, the list is final. Nothing is asked of SGLang's steps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

RETRACTED = "retracted"
MAX_WATCHED = 65536


class Began(NamedTuple):
    """`prefill`: the server's bootstrap address. `reason`: of a cold drafter, else ""."""

    prefill: str
    state: str
    reason: str = ""


class _Watched:
    def __init__(self, request: weakref.ref[Any], histogram: list[int], began: Began) -> None:
        self.request, self.histogram, self.began = request, histogram, began

    @property
    def has_ended(self) -> bool:
        request = self.request()
        return request is None or request.finished()


class Requests:
    """`count`: takes how each request that has ended began, and its histogram: rounds by accepted
    drafts. `begin` and `retract` are the scheduler's, `settle` is one other thread's."""

    def __init__(self, count: Callable[[Began, list[int]], None]) -> None:
        self._count = count
        self._new: deque[tuple[str, Any, Any, str, Any]] = deque(maxlen=MAX_WATCHED)
        self._watched: dict[str, _Watched] = {}

    def begin(self, request: Any, prefill: str, outcome: tuple[str, str]) -> None:
        """Its KV is in place. One that begins twice was retracted and prefilled again. `outcome`:
        state and reason. Only notes it: the scheduler waits."""
        histogram = getattr(request, "spec_correct_drafts_histogram", None)
        if histogram is not None:
            self._new.append((request.rid, weakref.ref(request), histogram, prefill, outcome))

    def retract(self, request: Any) -> None:
        self._new.append((request.rid, None, None, "", None))

    def settle(self) -> None:
        """Count those that have ended."""
        while self._new:
            rid, request, histogram, prefill, outcome = self._new.popleft()
            known = self._watched.get(rid)
            if known is not None:
                known.began = Began(known.began.prefill, RETRACTED)
            elif request is not None and len(self._watched) < MAX_WATCHED:
                self._watched[rid] = _Watched(request, histogram, Began(prefill, *outcome))
        for rid, one in list(self._watched.items()):
            if one.has_ended:
                del self._watched[rid]
                self._count(one.began, one.histogram)

    def __len__(self) -> int:
        return len(self._new) + len(self._watched)
