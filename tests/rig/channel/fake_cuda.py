"""A fake CUDA driver on host memory, for cuda.py. Kernels run late, in Triton's interpreter.

Arguments are converted by the prototypes in cuda.py, as for libcuda. Copies and launches run when
an event after them, or the stream, is queried for the `late + 1`-th time.

Some queries fail with a code from 900 to 908 and run nothing, as if another thread were capturing a
graph. A thread must set the device's context before its first call.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from sglang_mixkv.draft import cuda, kernels

UNKNOWN, NOT_READY, LAUNCH_FAILED, INVALID_CONTEXT = 999, 600, 719, 201
CAPTURES = {
    900: b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 901: b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    902: b"CUDA_ERROR_STREAM_CAPTURE_MERGE", 903: b"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
    904: b"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", 905: b"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
    906: b"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", 907: b"CUDA_ERROR_CAPTURED_EVENT",
    908: b"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
}  # fmt: skip
NAMES = CAPTURES | {
    LAUNCH_FAILED: b"CUDA_ERROR_LAUNCH_FAILED", INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT"
}  # fmt: skip
ASKING = ("cuEventQuery", "cuStreamQuery")
UNBOUND = {
    "cuInit", "cuGetErrorName", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent", "cuEventQuery", "cuThreadExchangeStreamCaptureMode",
}  # fmt: skip
"""Functions that need no current context, according to CUDA's manual."""
ORDERED = {cuda.RDMA_SUPPORTED: 1, cuda.RDMA_FLUSH_OPTIONS: 1, cuda.RDMA_ORDERING: 100}
INTERPRETING = threading.Lock()  # Triton's interpreter has a single grid for all threads
H100 = {cuda.MAJOR: 9, cuda.MINOR: 0, **ORDERED}


class FakeCuda:
    """`attributes`: the device's. `log`: all calls with their arguments; `calls`: the number of
    calls per function. `captures`: the share of queries that fail because of a graph capture.
    `answers`: codes that the next queries return unconditionally. `fails`: a function whose calls
    all fail. `broken`: the context is lost; nothing runs, and every call returns the error."""

    def __init__(
        self, late: int = 1, attributes: dict[int, int] | None = None, captures: float = 0.2
    ) -> None:
        self.late, self.attributes, self.captures = late, H100 | (attributes or {}), captures
        self.calls: Counter[str] = Counter()
        self.log = list[tuple[Any, ...]]()
        self.answers = list[int]()
        self.fails, self.broken = "", False
        self._asked, self._random, self._bound = 0, random.Random(late), set[int]()
        self.compiled: list[Any] = []
        self.events: dict[int, int] = {}  # by recorded event: its number of queries
        self._queue: deque[Callable[[], None] | int] = deque()
        self._running = threading.Lock()
        self._handles, self._memory = itertools.count(1 << 40), list[Any]()
        for name, arguments in cuda.PROTOTYPES.items():
            call = ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)(partial(self._call, name))
            setattr(self, name, call)

    def driver(self) -> cuda.Driver:
        return cuda.Driver(0, self)

    def compiling(self) -> Any:
        """Return a context in which Triton compiles for this driver."""
        return mock.patch.object(kernels.triton, "compile", self._compile)

    def _compile(self, source: Any, target: Any, options: Any) -> Any:
        assert (target.backend, target.arch, options) == ("cuda", 90, {"num_warps": 4})
        names = source.fn.arg_names
        constants = {names[place]: value for (place,), value in source.constants.items()}
        types = {name: "constexpr" if name in constants else "*i64" for name in names}
        assert source.signature == types
        image = ctypes.create_string_buffer(f"image {len(self.compiled)}".encode())
        self.compiled.append((image.value, partial(self._interpret, source.fn, constants)))
        metadata = SimpleNamespace(name=source.fn.__name__, shared=32)
        return SimpleNamespace(metadata=metadata, asm={"cubin": image.value})

    @staticmethod
    def _interpret(kernel: Any, constants: dict[str, int], grid: Any, values: list[int]) -> None:
        words = [np.ctypeslib.as_array(ctypes.c_int64.from_address(n)) for n in values[:3]]
        with INTERPRETING:
            kernel[grid](*map(torch.from_numpy, words), **constants)

    def _call(self, name: str, *arguments: Any) -> int:
        self.calls[name] += 1
        self.log.append((name, *arguments))
        if name == self.fails or (self.broken and name != "cuGetErrorName"):
            return LAUNCH_FAILED
        if name not in UNBOUND and threading.get_ident() not in self._bound:
            return INVALID_CONTEXT
        if name in ASKING and self.answers:
            return self.answers.pop(0)
        if name in ASKING and self._random.random() < self.captures:
            return self._random.choice(list(CAPTURES))
        try:
            return getattr(self, f"_{name}")(*arguments) or 0
        except Exception:  # ctypes would ignore it
            traceback.print_exc()
            return UNKNOWN

    def _run_to(self, event: int | None) -> int:
        """Run the queue up to an event. The lock prevents another thread from seeing an event as
        done while a kernel before it is still running."""
        with self._running:
            while not self.broken and self._queue and (event is None or event in self._queue):
                work = self._queue.popleft()
                if callable(work):
                    work()
        return LAUNCH_FAILED if self.broken else 0

    # -- libcuda's functions

    def _cuInit(self, flags: int) -> None: ...

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text[0] = NAMES.get(code)

    def _cuDeviceGet(self, device: Any, index: int) -> None:
        device[0] = self.device = 40 + index

    def _cuDeviceGetAttribute(self, value: Any, number: int, device: int) -> None:
        assert device == self.device
        value[0] = self.attributes[number]

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        assert device == self.device
        context[0] = self._context = next(self._handles)

    def _cuCtxSetCurrent(self, context: int) -> None:
        assert context == self._context
        self._bound.add(threading.get_ident())

    def _cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> None:
        assert (flags, priority) == (1, -1)
        stream[0] = self._stream = next(self._handles)

    def _cuStreamQuery(self, stream: int) -> int:
        assert stream == self._stream
        self._asked += 1
        return self._run_to(None) if self._asked % (self.late + 1) == 0 else NOT_READY

    def _cuMemAlloc_v2(self, address: Any, size: int) -> None:
        self._memory.append(torch.full((size + 64,), 0xEE, dtype=torch.uint8))
        address[0] = -(-self._memory[-1].data_ptr() // 64) * 64

    def _cuMemFree_v2(self, address: int) -> None:
        (one,) = (m for m in self._memory if 0 <= address - m.data_ptr() < 64)
        self._memory = [memory for memory in self._memory if memory is not one]

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        assert mode[0] == 2, "CU_STREAM_CAPTURE_MODE_RELAXED"

    def _cuMemHostAlloc(self, address: Any, size: int, flags: int) -> None:
        assert flags == 3
        self._memory.append(torch.full((size,), 0xEE, dtype=torch.uint8))
        address[0] = self._memory[-1].data_ptr()

    def _cuMemcpyHtoDAsync_v2(self, target: int, source: int, size: int, stream: int) -> None:
        assert stream == self._stream
        self._queue.append(partial(ctypes.memmove, target, source, size))

    def _cuModuleLoadData(self, module: Any, image: int) -> None:
        images = [known for known, _ in self.compiled]
        module[0] = 1 + images.index(ctypes.string_at(image))

    def _cuModuleGetFunction(self, function: Any, module: int, name: bytes) -> None:
        function[0] = module

    def _cuLaunchKernel(self, function: int, *given: Any) -> None:
        *grid, x, y, z, shared, stream, parameters, extra = given
        assert (x, y, z, shared, stream) == (128, 1, 1, 32, self._stream)
        assert not extra
        assert 0 < grid[0] < 1 << 31
        assert all(0 < size < 1 << 16 for size in grid[1:])
        values = [ctypes.c_uint64.from_address(parameters[k]).value for k in range(7)]
        self._queue.append(partial(self.compiled[function - 1][1], tuple(grid), values))

    def _cuEventCreate(self, event: Any, flags: int) -> None:
        assert flags == 2
        event[0] = next(self._handles)

    def _cuEventRecord(self, event: int, stream: int) -> None:
        assert (event in self.events, stream) == (False, self._stream), "recorded twice"
        self.events[event] = 0
        self._queue.append(event)

    def _cuEventQuery(self, event: int) -> int:
        self.events[event] += 1
        return self._run_to(event) if self.events[event] > self.late else NOT_READY

    def _cuEventDestroy_v2(self, event: int) -> None:
        del self.events[event]

    def _cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> None:
        assert (target, scope) == (0, 100)
