"""Writes that SGLang's own NIXL code posts on a prefill rank: state, and all of a peer without a
drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang.srt.disaggregation.nixl.conn import _NixlPostError

from sglang_mixkv.prefill.rooms import Room
from sglang_mixkv.prefill.worker import Worker
from sglang_mixkv.transport.nixl import Code, Nixl

Why = Callable[[str, Room, int], str]
"""The reason of a room that a write failed of: session, room, code."""


class StockWrites:
    """They are kept with their peers, on the thread's worker: SGLang takes a write whose connection
    broke for one that goes on, and goes on posting to that peer."""

    def __init__(self, transport: Nixl, why: Why) -> None:
        self._transport, self._why = transport, why

    def post(self, worker: Worker | None, session: str, write: Callable[[], Any]) -> Any:
        """The handle, None where there was nothing to write. Raises _NixlPostError for a peer
        whose connection is lost, before the write or by it."""
        if worker is None or worker.task is None:
            return write()
        if session in self._transport.lost:
            raise self._error(session, worker.task.room)
        try:
            handle = write()
        except _NixlPostError as error:
            if self._transport.loses(session, error.__cause__):
                raise self._error(session, worker.task.room) from error
            raise
        if handle is not None:
            worker.posted.append((session, handle))
        return handle

    def ended(self, worker: Worker | None, *, failure_seen: bool) -> list[Any]:
        """Handles of this thread's task whose connection broke. Raises _NixlPostError for the
        first of them, unless the task has failed already."""
        task = worker.task if worker is not None else None
        if worker is None or task is None:
            return []
        broken = [(s, h) for s, h in worker.posted if self._transport.has_lost(s, h)]
        if broken and not failure_seen:
            raise self._error(broken[0][0], task.room)
        return [handle for _, handle in broken]

    def _error(self, session: str, room: Room) -> _NixlPostError:
        return _NixlPostError(self._why(session, room, Code.LOST))


def explained(handles: Iterable[Any], why: Callable[[Exception], str]) -> Iterator[Any]:
    """Handles of state; where it is laid out otherwise than stock expects, with a reason that
    says more than its exception. Only what was posted may still arrive."""
    try:
        yield from handles
    except _NixlPostError:
        raise
    except Exception as error:
        raise RuntimeError(why(error)) from error
