"""Streams for part_order, each with work that ends late: a GPU's, and a model of them.

stream()      another's, as a forward's: do(work), mark() -> what ends with the work so far
unwaited()    in it CudaRows waits for nothing
slowly()      in it what CudaRows starts ends late
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch

from sglang_mixkv.rows import cuda
from sglang_mixkv.rows.host import RowCopy


class Waitable(Protocol):
    """A stream, or what it has done at one moment."""

    def synchronize(self) -> None: ...


class Stream(Waitable, Protocol):
    def delay(self) -> None:
        """What follows on this stream begins late."""

    def do(self, work: Callable[[], Any]) -> None: ...

    def mark(self) -> Waitable: ...


# ---------------------------------------------------------------- of a GPU


class CudaStream:
    """Of the current device. `cycles`: of its clock that a delay takes."""

    def __init__(self, cycles: int) -> None:
        self._stream, self._cycles = torch.cuda.Stream(), cycles

    def delay(self) -> None:
        self.do(lambda: torch.cuda._sleep(self._cycles))

    def do(self, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Waitable:
        return self._stream.record_event()

    def synchronize(self) -> None:
        self._stream.synchronize()


class Unwaited(torch.cuda.Stream):
    def synchronize(self) -> None:
        """Nothing."""


class CudaStreams:
    """Of the current device."""

    def __init__(self, delay_ms: float) -> None:
        self._cycles = int(delay_ms * _cycles_in_ms())

    def stream(self) -> Stream:
        return CudaStream(self._cycles)

    def unwaited(self) -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(torch.cuda, "Stream", Unwaited)

    def slowly(self) -> contextlib.AbstractContextManager[Any]:
        def launch(what: RowCopy, device: Any) -> None:
            start = cuda.prepared(what, device)  # its uploads before the delay: they may wait
            torch.cuda._sleep(self._cycles)
            start()

        return mock.patch.object(cuda, "launch", launch)


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


class ModelStream:
    """All of its work is late."""

    def __init__(self, model: Any) -> None:
        self._model, self._stream = model, model.stream()

    def delay(self) -> None: ...

    def do(self, work: Callable[[], Any]) -> None:
        with self._model.on(self._stream):
            self._model.start(work)

    def mark(self) -> Waitable:
        return self._stream

    def synchronize(self) -> None:
        self._stream.synchronize()


class ModelStreams:
    """tests/rig/streams.py, in which all work is late."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def stream(self) -> Stream:
        return ModelStream(self._model)

    @contextlib.contextmanager
    def unwaited(self) -> Iterator[None]:
        class Unwaited:
            def synchronize(self) -> None:
                """Nothing."""

        with mock.patch.object(torch.cuda, "Stream", return_value=Unwaited()):
            yield

    def slowly(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def here(device: str, delay_ms: float) -> Iterator[CudaStreams | ModelStreams]:
    if device == "cuda":
        yield CudaStreams(delay_ms)
        return
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from rig.streams import Streams

    with Streams() as model:
        yield ModelStreams(model)
