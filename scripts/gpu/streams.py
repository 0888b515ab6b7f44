"""Streams for part_order, each with work that ends late: a GPU's, and a model of them.

stream()        another's, as a forward's: late(work), now(work), mark() -> what ends with it
slowly(waits)   in it the product's own stream ends late, and is waited for or not
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_mixkv.draft import rows as product

Work = Callable[[], Any]


# ---------------------------------------------------------------- of a GPU


class CudaStream:
    """Of the current device. `cycles`: of its clock that a delay takes."""

    def __init__(self, cycles: int) -> None:
        self._stream, self._cycles = torch.cuda.Stream(), cycles

    def late(self, work: Work) -> None:
        self.now(partial(torch.cuda._sleep, self._cycles))
        self.now(work)

    def now(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Any:
        return self._stream.record_event()

    def synchronize(self) -> None:
        self._stream.synchronize()


class Unwaited(torch.cuda.Stream):
    def synchronize(self) -> None:
        """Nothing."""


class CudaStreams:
    def __init__(self, delay_ms: float) -> None:
        self._cycles = int(delay_ms * _cycles_in_ms())

    def stream(self) -> CudaStream:
        return CudaStream(self._cycles)

    @contextlib.contextmanager
    def slowly(self, waits: bool) -> Iterator[None]:
        parts = product.DraftRows._parts

        def late_parts(rows: Any, *what: Any) -> Iterator[Any]:
            for number, part in enumerate(parts(rows, *what)):
                if not number:  # behind the upload, which may wait for its stream
                    torch.cuda._sleep(self._cycles)
                yield part

        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(product.DraftRows, "_parts", late_parts))
            patches.enter_context(mock.patch.object(product, "_own", threading.local()))
            if not waits:
                patches.enter_context(mock.patch.object(torch.cuda, "Stream", Unwaited))
            yield


def _cycles_in_ms(tried: int = 20_000_000) -> float:
    """Measured after the clock has gone up."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(tried)
    start.record()
    torch.cuda._sleep(tried)
    end.record()
    end.synchronize()
    return tried / start.elapsed_time(end)


# ---------------------------------------------------------------- of a machine without one


class Deferred(TorchDispatchMode):
    """What changes memory in it becomes a stream's work."""

    def __init__(self, stream: ModelStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self._stream.runs or not func._schema.is_mutable:
            return func(*args, **given)
        self._stream.now(partial(func, *args, **given))
        return given.get("out", args[0])


class ModelStream:
    """Its work is done when the stream is waited for, or a while after it was marked; `priority`
    as torch's."""

    def __init__(self, delay_s: float, priority: int = 0) -> None:
        self._work: deque[Work] = deque()
        self._delay_s, self._due, self.runs = delay_s, float("inf"), False

    def late(self, work: Work) -> None:
        self._work.append(work)

    now = late

    def mark(self) -> Any:
        self._due = time.monotonic() + self._delay_s
        return self

    def query(self) -> bool:
        if time.monotonic() >= self._due:
            self.synchronize()
        return not self._work

    def synchronize(self) -> None:
        self.runs = True
        while self._work:
            self._work[0]()
            self._work.popleft()
        self.runs = False


class ModelStreams:
    """The product's code for a GPU, over host memory."""

    def __init__(self, delay_ms: float) -> None:
        self._delay_s = delay_ms / 1e3

    def stream(self) -> ModelStream:
        return ModelStream(self._delay_s)

    @contextlib.contextmanager
    def slowly(self, waits: bool) -> Iterator[None]:
        real, made = product.own_stream, list[ModelStream]()

        def new_stream(_: Any, priority: int) -> ModelStream:
            made.append(ModelStream(self._delay_s, priority))
            if not waits:
                made[-1].synchronize = lambda: None  # type: ignore[method-assign]
            return made[-1]

        with contextlib.ExitStack() as patches:
            for owner, name, new in (
                (product, "own_stream", lambda _: real(torch.device("cuda", 0))),
                (product, "_own", threading.local()),
                (torch.cuda, "Stream", new_stream),
                (torch.cuda, "stream", Deferred),
            ):
                patches.enter_context(mock.patch.object(owner, name, new))
            yield


def here(device: str, delay_ms: float) -> CudaStreams | ModelStreams:
    return CudaStreams(delay_ms) if device == "cuda" else ModelStreams(delay_ms)
