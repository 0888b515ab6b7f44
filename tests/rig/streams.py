"""torch.cuda's streams on a machine without a GPU: a model in which no work is in a hurry.

What was started on a stream is done when that stream is waited for, and not before.

    with Streams() as streams:
        rows = CudaRows(0)          # over host memory
        other = streams.stream()    # another's
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from sglang_mixkv.rows import cuda
from sglang_mixkv.rows.host import HostRows, RowCopy

UNTOUCHED = 0xEE  # bytes of memory before anything was done with it


class Streams:
    """`now`: the current stream, at first the caller's own; `waited`: those that were."""

    def __init__(self) -> None:
        self.now: Any = self
        self.work: list[tuple[Any, Callable[[], Any]]] = []
        self.waited: list[Any] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Streams:
        for owner, name, new in (
            (torch.cuda, "Stream", lambda _, priority=0: Stream(self, priority)),
            (torch.cuda, "stream", self.on),
            (torch.cuda, "device", lambda _: contextlib.nullcontext()),
            (torch, "zeros", self.zeros),
            (cuda, "launch", self.launch),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, new))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def stream(self) -> Stream:
        return Stream(self)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def start(self, do: Callable[[], Any]) -> None:
        """Work on the current stream."""
        self.work.append((self.now, do))

    def zeros(self, size: int, **_: Any) -> Any:
        memory = torch.full((size,), UNTOUCHED, dtype=torch.uint8)
        self.start(memory.zero_)
        return memory

    def launch(self, what: RowCopy, _: Any) -> None:
        self.start(lambda: HostRows().copy(what))

    def finish(self, stream: Any = None) -> None:
        """Do the work of one stream, or what is left on all."""
        due = [entry for entry in self.work if stream in (None, entry[0])]
        self.work = [entry for entry in self.work if entry not in due]
        for _, do in due:
            do()


class Stream:
    """`priority`: torch deals the few streams of each priority out again and again."""

    def __init__(self, streams: Streams, priority: int = 0) -> None:
        self._streams, self.priority = streams, priority

    def synchronize(self) -> None:
        self._streams.waited.append(self)
        self._streams.finish(self)
