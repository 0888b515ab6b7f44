"""The CUDA driver calls that rows_gpu.py needs, through ctypes, without releasing the GIL.

While another thread computes in Python, releasing the GIL costs sys.getswitchinterval(), 5 ms, each
time. torch releases it in each operation, and Triton's launcher in each launch. ctypes.PyDLL holds
it. No call waits for work unless the device's queue is full. Even then the device proceeds without
the GIL, since neither torch nor SGLang queues host functions (cudaLaunchHostFunc).

The stream is created here, with a higher priority than SGLang's. torch would reuse one of its few
streams, perhaps SGLang's.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

# CUDA_ERROR_NOT_READY, or unknown, since a thread of this process is capturing a graph
PENDING = (600, *range(900, 909))
NON_BLOCKING, PORTABLE_AND_MAPPED, NO_TIMING = 1, 3, 2  # flags of a stream, host memory, an event
ABOVE_NORMAL = -1  # a stream's priority; SGLang's have 0
MAJOR, MINOR = 75, 76  # attributes of a device: its compute capability
RDMA_SUPPORTED, RDMA_FLUSH_OPTIONS, RDMA_ORDERING = 116, 117, 118  # attributes of a device
FLUSH_BY_HOST = 1  # a bit of RDMA_FLUSH_OPTIONS
TO_OWNER = 100  # RDMA_ORDERING: the device sees remote writes in order. Also a flush's scope

_P, _U = c_void_p, c_uint
PROTOTYPES: dict[str, list[Any]] = {
    "cuInit": [_U],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(_P), c_int],
    "cuCtxSetCurrent": [_P],
    "cuStreamCreateWithPriority": [POINTER(_P), _U, c_int],
    "cuStreamQuery": [_P],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemHostAlloc": [POINTER(_P), c_size_t, _U],
    "cuMemcpyHtoDAsync_v2": [c_uint64, _P, c_size_t, _P],
    "cuModuleLoadData": [POINTER(_P), _P],
    "cuModuleGetFunction": [POINTER(_P), _P, c_char_p],
    "cuLaunchKernel": [_P, _U, _U, _U, _U, _U, _U, _U, _P, POINTER(_P), POINTER(_P)],
    "cuEventCreate": [POINTER(_P), _U],
    "cuEventRecord": [_P, _P],
    "cuEventQuery": [_P],
    "cuEventDestroy_v2": [_P],
    "cuFlushGPUDirectRDMAWrites": [c_int, c_int],
}


class CudaError(RuntimeError):
    """A driver call failed. After most failures the context runs nothing more."""


class UnsafeError(CudaError):
    """Copies on this device would be wrong."""


def is_over(work: Any) -> bool:
    """Return whether a torch event has completed, or a torch stream is empty. Return False while a
    graph is being captured, when this is unknown. Raises on other errors of the query."""
    try:
        return bool(work.query())
    except Exception as error:
        if "captur" in str(error):  # only errors 900 to 908 contain this word
            return False
        raise


def libcuda() -> Any:
    library = ctypes.PyDLL("libcuda.so.1")
    for name, arguments in PROTOTYPES.items():
        getattr(library, name).argtypes = arguments
    return library


def spare_captures(library: Any = None) -> None:
    """Let the calling thread query events without failing another thread's graph capture, as a
    query does by default. Call it once in each thread."""
    (library or libcuda()).cuThreadExchangeStreamCaptureMode(byref(c_int(2)))  # relaxed


class Driver:
    """A device, its primary context (shared with torch) and one stream. Tests pass a `library`."""

    def __init__(self, index: int, library: Any = None) -> None:
        self.library: Any = library or libcuda()
        self.call("cuInit", 0)
        self._device = self.get(c_int, "cuDeviceGet", index)
        self._context = self.get(_P, "cuDevicePrimaryCtxRetain", self._device)
        self.bind()
        self.stream = self.get(_P, "cuStreamCreateWithPriority", NON_BLOCKING, ABOVE_NORMAL)
        self.capability = 10 * self._attribute(MAJOR) + self._attribute(MINOR)

    def call(self, name: str, *arguments: Any, pending: tuple[int, ...] = ()) -> bool:
        """Call a function. Return False if the code is one of `pending`; raise on other errors."""
        if (code := getattr(self.library, name)(*arguments)) and code not in pending:
            text = c_char_p()
            self.library.cuGetErrorName(code, byref(text))
            raise CudaError(f"{name}: {(text.value or b'').decode() or code}")
        return not code

    def get(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Call a function, and return the value that it writes to its first argument."""
        found = kind()
        self.call(name, byref(found), *arguments)
        return found.value

    def _attribute(self, number: int) -> int:
        return int(self.get(c_int, "cuDeviceGetAttribute", number, self._device))

    def bind(self) -> None:
        """Make this the calling thread's device. Every thread must call it first."""
        self.call("cuCtxSetCurrent", self._context)

    def allocate(self, size: int) -> tuple[int, int, memoryview]:
        """Allocate device memory and pinned host memory of the same size, never freed. Return both
        addresses and the host's bytes, which kernels access at the host address."""
        device = int(self.get(c_uint64, "cuMemAlloc_v2", size))
        host = int(self.get(_P, "cuMemHostAlloc", size, PORTABLE_AND_MAPPED))
        return device, host, memoryview((ctypes.c_uint8 * size).from_address(host)).cast("B")

    def upload(self, target: int, source: int, size: int) -> None:
        """Queue a copy from pinned memory, which must not change before the copy is done."""
        self.call("cuMemcpyHtoDAsync_v2", target, source, size, self.stream)

    def load(self, image: bytes, name: str) -> int:
        module = self.get(_P, "cuModuleLoadData", image)
        return int(self.get(_P, "cuModuleGetFunction", module, name.encode()))

    def launch(self, function: int, grid: Any, threads: int, shared: int, parameters: Any) -> None:
        self.call(
            "cuLaunchKernel", function, *grid, threads, 1, 1, shared, self.stream, parameters, None
        )

    def drain(self) -> None:
        """Wait for all started work to end, in any thread. A failed context runs nothing more."""
        self.library.cuCtxSetCurrent(self._context)  # a failure shows in the next call
        with contextlib.suppress(CudaError):
            while not self.call("cuStreamQuery", self.stream, pending=PENDING):
                time.sleep(1e-4)

    def needs_flush(self) -> bool:
        """Return whether `flush` must be called between a NIC's write to this device and the launch
        that reads the data. Raises UnsafeError if the device cannot flush either."""
        if self._attribute(RDMA_ORDERING) >= TO_OWNER:
            return False
        can_flush = bool(self._attribute(RDMA_FLUSH_OPTIONS) & FLUSH_BY_HOST)
        if self._attribute(RDMA_SUPPORTED) and not can_flush:
            raise UnsafeError("the GPU neither orders a NIC's writes nor lets the host flush them")
        return can_flush

    def flush(self) -> None:
        self.call("cuFlushGPUDirectRDMAWrites", 0, TO_OWNER)


class DeviceMemory:
    """Memory that torch.as_tensor accepts and keeps alive. Transports can register it; torch's own
    memory may be in expandable segments, which they cannot."""

    def __init__(self, size: int, driver: Driver) -> None:
        self._address, self._library = driver.get(c_uint64, "cuMemAlloc_v2", size), driver.library
        data = {"shape": (size,), "typestr": "|u1", "data": (self._address, False), "version": 3}
        self.__cuda_array_interface__ = data

    def __del__(self) -> None:
        if hasattr(self, "_library"):
            self._library.cuMemFree_v2(self._address)


class Event:
    """An event after all work on the driver's stream so far. It is recorded once, on construction,
    and destroyed with its last reference, so it never covers later work. `error`: why the result of
    the completed work is unknown."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.error, self._over = driver, "", False
        self._handle = driver.get(_P, "cuEventCreate", NO_TIMING)
        driver.call("cuEventRecord", self._handle, driver.stream)

    def over(self) -> bool:
        """Return whether the work has ended. Any thread may call it."""
        try:
            if not self._over:
                self._over = self._driver.call("cuEventQuery", self._handle, pending=PENDING)
        except CudaError as error:  # not every error is sticky: kernels may still run
            self.error = str(error)
            self._driver.drain()
            self._over = True
        return self._over

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._driver.library.cuEventDestroy_v2(self._handle)
