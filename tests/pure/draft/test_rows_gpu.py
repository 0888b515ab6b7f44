"""The kernels and the driver of rows_gpu.py without a GPU.

The kernels run in Triton's interpreter, and the tests check the code that Triton compiles.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="Triton is not installed: no kernel is tested")

from rig.channel.fake_cuda import FakeCuda  # noqa: E402

from sglang_mixkv.draft import cuda, rows_gpu  # noqa: E402
from sglang_mixkv.draft import rows as rows_module  # noqa: E402
from sglang_mixkv.draft.kernels import compiled  # noqa: E402
from sglang_mixkv.draft.rows import DraftRows, Staging, own_stream  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("examples", [6, pytest.param(200, marks=pytest.mark.full)])
def test_interpreted_batches_are_right(examples: int) -> None:
    """All cases of rows_gpu_interpreted.py pass in Triton's interpreter.

    Triton reads TRITON_INTERPRET when it is imported, so the cases need a process of their own.
    """
    cases = Path(__file__).with_name("rows_gpu_interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(cases), "-q", "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1", "EXAMPLES": str(examples)},
        capture_output=True, text=True, cwd=cases.parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("page_size", [1, 64])
def test_kernels_copy_16_bytes_per_access_without_spills(capability: int, page_size: int) -> None:
    wide = r"%s\.global[a-z.]*\.(?:v2\.b64|v4\.b32)"
    expected = {
        "pack": (4, 4), "unpack": (4, 4), "settle": (0, 4), "clear": (0, 4), "seal": (0, 0),
    }  # fmt: skip
    for name, kernel in compiled(capability, page_size).items():
        ptx = kernel.asm["ptx"]
        assert tuple(len(re.findall(wide % code, ptx)) for code in ("ld", "st")) == expected[name]
        assert ".local" not in ptx
        assert f"sm_{capability}" in ptx
        assert kernel.metadata.num_warps == 4
        assert kernel.asm["cubin"][:4] == b"\x7fELF"


def test_kernels_compile_without_a_c_compiler(tmp_path: Path) -> None:
    """The kernels compile without a C compiler, which a server may lack.

    Triton's own launcher would need one.
    """
    code = "from sglang_mixkv.draft.kernels import compiled; print(*compiled(90, 1))"
    path = os.pathsep.join(sys.path)
    env = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "CC": "false"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    names = ["pack", "unpack", "seal", "settle", "clear"]
    assert done.stdout.split() == names, done.stderr[-2000:]


def test_prototypes_equal_those_of_cuda_h() -> None:
    """The prototypes of the driver's functions equal those of the cuda.h that Triton ships."""
    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda.h"
    declared = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
    integers = ("int", "CUresult", "CUdevice", "CUdevice_attribute")
    kinds: dict[str, Any] = dict.fromkeys(integers, ctypes.c_int)
    enums = re.findall(r"enum \w+\s*\{[^}]*\}\s*(CUflush\w+|CUstreamCaptureMode);", declared)
    kinds |= dict.fromkeys(enums, ctypes.c_int)
    kinds |= dict.fromkeys(re.findall(r"typedef struct \w+ \*(CU\w+);", declared), ctypes.c_void_p)
    kinds |= {"unsigned int": ctypes.c_uint, "size_t": ctypes.c_size_t, "char *": ctypes.c_char_p}
    kinds |= {"CUdeviceptr": ctypes.c_uint64, "void *": ctypes.c_void_p}

    def kind_of(words: str) -> Any:
        return kinds[words] if words in kinds else ctypes.POINTER(kind_of(words.removesuffix(" *")))

    for name, arguments in cuda.PROTOTYPES.items():
        plain = name.removesuffix("_v2")
        (listed, *_) = re.findall(rf"^CUresult CUDAAPI {plain}\((.*?)\);", declared, re.S | re.M)
        types = (
            one.replace("const ", "").replace("*", " * ").split()[:-1] for one in listed.split(",")
        )
        assert [kind_of(" ".join(words)) for words in types] == arguments, name
        if name != plain:
            assert re.search(rf"define {plain}\s.*\b{name}\b", declared), name


DEVICE, FLUSH = "CU_DEVICE_ATTRIBUTE_", "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_"
RDMA, HOST = f"{DEVICE}GPU_DIRECT_RDMA_", "CU_MEMHOSTALLOC_"
NUMBERS = {
    "MAJOR": f"{DEVICE}COMPUTE_CAPABILITY_MAJOR", "MINOR": f"{DEVICE}COMPUTE_CAPABILITY_MINOR",
    "RDMA_SUPPORTED": f"{RDMA}SUPPORTED", "RDMA_FLUSH_OPTIONS": f"{RDMA}FLUSH_WRITES_OPTIONS",
    "RDMA_ORDERING": f"{RDMA}WRITES_ORDERING", "FLUSH_BY_HOST": f"{FLUSH}OPTION_HOST",
    "NON_BLOCKING": "CU_STREAM_NON_BLOCKING", "NO_TIMING": "CU_EVENT_DISABLE_TIMING",
}  # fmt: skip


def test_numbers_equal_those_of_cuda_h() -> None:
    """The numbers of CUDA's attributes and flags equal those of cuda.h.

    A wrong number would query another attribute without an error.
    """
    header = (Path(triton.__file__).parent / "backends/nvidia/include/cuda.h").read_text()
    number = dict(re.findall(r"\b(CU\w+)\s*=?\s+(0x\d+|\d+(?:<<\d+)?)", header))
    number = {name: eval(text) for name, text in number.items()}  # 12, 0x01 or 1<<3
    assert {name: getattr(cuda, name) for name in NUMBERS} == {
        name: number[theirs] for name, theirs in NUMBERS.items()
    }
    both = number[f"{HOST}PORTABLE"] | number[f"{HOST}DEVICEMAP"]
    owner = number[f"{FLUSH}TO_OWNER"], number["CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER"]
    assert (both, owner) == (cuda.PORTABLE_AND_MAPPED, (cuda.TO_OWNER,) * 2)
    captured = {value for name, value in number.items() if "_ERROR_" in name and "CAPTURE" in name}
    assert set(cuda.PENDING) == {number["CUDA_ERROR_NOT_READY"], *captured}


def test_no_driver_call_releases_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls of the driver keep the GIL, and check the types of their arguments."""
    keeps = mock.MagicMock()
    monkeypatch.setattr(ctypes, "PyDLL", lambda _: keeps)
    library = cuda.libcuda()
    for name, arguments in cuda.PROTOTYPES.items():
        assert getattr(library, name) is getattr(keeps, name)
        assert getattr(library, name).argtypes == arguments


def pool(width: int = 16, start: int = 0) -> torch.Tensor:
    """Make a pool of 4 rows of 2 heads."""
    memory = torch.zeros(8 * width + 64, dtype=torch.uint8)
    start += -memory.data_ptr() % 16
    return memory[start : start + 8 * width].view(4, 2, width)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([pool(), pool(24)], r"heads of \[16, 24\] bytes"),
        ([pool(start=8)], "begin at a multiple of 16"),
    ],
)
def test_pools_that_kernels_do_not_support_are_rejected(entries: list, words: str) -> None:
    rows, staging = DraftRows(entries, range(2)), Staging(1, 4096, CPU)
    with pytest.raises(ValueError, match=words):
        rows_gpu.GpuRows(rows, 1, staging, FakeCuda().driver())


def test_the_reason_for_a_pool_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(1, 4096, CPU)
    rows = DraftRows([pool()], range(2))
    assert rows_gpu.gpu_rows(rows, 1, staging) == "the pool is on cpu, which is not a CUDA device"
    rows.device = torch.device("cuda", 0)

    def no_library(path: str) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "PyDLL", no_library)
    assert "libcuda.so.1" in rows_gpu.gpu_rows(rows, 1, staging)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "not a CUDA device" in rows_gpu.gpu_rows(rows, 1, staging)
    monkeypatch.setattr(torch.version, "hip", None)
    old = SimpleNamespace(capability=75, needs_flush=lambda: False)
    rows.device = torch.device("cuda", 3)
    monkeypatch.setattr(rows_gpu, "Driver", {3: old}.__getitem__)
    assert "expected 8.0 or later" in rows_gpu.gpu_rows(rows, 1, staging)
    old.capability = 90
    monkeypatch.setattr(rows_gpu, "GpuRows", lambda *made: made)
    assert rows_gpu.gpu_rows(rows, 1, staging) == (rows, 1, staging, old)
    assert "SGLANG_MIXKV_GPU_COPIES" in rows_gpu.gpu_rows(rows, 1, staging, "torch")


@pytest.mark.parametrize("asked", ["auto", "torch", "kernels"])
def test_a_gpu_that_needs_a_flush_is_flushed_or_rejected(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Writes by a NIC are safe in every mode, or the pool is rejected.

    A GPU that needs a flush gets one even if torch copies. A GPU that needs a flush but does not
    support it is rejected.
    """
    rows = DraftRows([pool()], range(2))
    rows.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    for attributes in (
        {cuda.RDMA_ORDERING: 0},
        {cuda.RDMA_ORDERING: 0, cuda.RDMA_FLUSH_OPTIONS: 2},
    ):
        driver = FakeCuda(attributes={**attributes, cuda.MAJOR: 7}).driver()
        monkeypatch.setattr(rows_gpu, "Driver", lambda index, driver=driver: driver)
        if len(attributes) == 1:
            assert isinstance(rows_gpu.gpu_rows(rows, 1, Staging(1, 4096, CPU), asked), str)
            assert rows.flush == driver.flush
        else:
            with pytest.raises(cuda.UnsafeError, match="neither orders"):
                rows_gpu.gpu_rows(rows, 1, Staging(1, 4096, CPU), asked)


def test_device_memory_is_freed_with_its_last_reference() -> None:
    device = FakeCuda()
    driver = device.driver()
    one = cuda.DeviceMemory(4096, driver)
    about = one.__cuda_array_interface__
    assert (about["shape"], about["typestr"], about["data"][1]) == ((4096,), "|u1", False)
    assert 0 <= about["data"][0] - device._memory[0].data_ptr() < 64
    del one
    assert device._memory == []
    device.fails = "cuMemAlloc_v2"
    with pytest.raises(cuda.CudaError, match="cuMemAlloc_v2"):
        cuda.DeviceMemory(4096, driver)


def test_a_query_does_not_end_another_threads_capture() -> None:
    device = FakeCuda()
    cuda.spare_captures(device)
    assert device.calls == {"cuThreadExchangeStreamCaptureMode": 1}


# ---------------------------------------------------------------- events


CAPTURING = "CUDA error: operation not permitted when stream is capturing"


@pytest.mark.parametrize("in_body", [False, True])
def test_own_stream_waits_for_copies_during_a_capture(
    monkeypatch: pytest.MonkeyPatch, in_body: bool
) -> None:
    """`own_stream` waits for torch's copies during a graph capture, and raises a persistent error.

    The request's gate opens only after these copies.
    """
    answers: list[Any] = [RuntimeError(CAPTURING), False, RuntimeError(CAPTURING), True]
    stream = SimpleNamespace(query=mock.Mock(side_effect=answers))
    monkeypatch.setattr(rows_module._own, "stream", stream, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    error = pytest.raises(RuntimeError, match="captur") if in_body else nullcontext()
    with error, own_stream(torch.device("cuda", 0)):
        if in_body:
            raise RuntimeError(CAPTURING)
    assert stream.query.call_count == 4
    stream.query.side_effect = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="launch failure"), own_stream(torch.device("cuda", 0)):
        pass
