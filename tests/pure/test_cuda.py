"""rows/cuda.py without a GPU: its bytes in Triton's interpreter, its machine code as Triton
compiles it for Hopper, its streams against a model of them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig.scene import ints, noise
from test_rows import RowCase

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.rows.host import RowCopy, numbers

triton = pytest.importorskip("triton", reason="Triton is not installed: the kernel is not tested")
torch = pytest.importorskip("torch")
from rig.streams import Streams  # noqa: E402

from sglang_mixkv.rows import cuda  # noqa: E402

# ---------------------------------------------------------------- bytes, in the interpreter


def test_the_kernel_copies_as_a_plain_loop_does_in_tritons_interpreter() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["kernel", "agrees"]), done.stderr


# (widths of the entries, bytes between two rows): words of 16, 8, 4, 2 and 1 bytes; rows shorter
# than a column, as long, and longer, alone and beside short ones.
SHAPES = [
    *[((16, 48), 16), ((128, 32), 0), ((144, 16), 112), ((1152, 656), 16), ((272,), 0)],
    *[((8, 24), 8), ((136, 264), 8), ((4, 12), 4), ((132,), 4), ((6, 2), 2), ((130,), 2)],
    *[((5, 1), 0), ((129, 3), 7), ((256,), 1)],
]


def far(what: RowCopy) -> RowCopy:
    """The same copy with row numbers, and so distances, that 32 bits do not hold."""
    by = 1 << 31
    return replace(
        what,
        src=what.src - by * what.src_stride,
        dst=what.dst - by * what.dst_stride,
        src_rows=numbers(what.src_rows) + by,
        dst_rows=numbers(what.dst_rows) + by,
    )


def compare_kernel_with_a_plain_loop() -> None:
    """The body of the test above. Row counts: one, a full block, one more, and not quite two."""
    seen = set()
    for number, (widths, gap) in enumerate(SHAPES):
        entries = [(width, width + gap, width + i * gap) for i, width in enumerate(widths)]
        word = cuda.word_bytes(RowCase(entries, [0], [0]).what())
        block = cuda.variant(word)["BLOCK"]
        seen.add(word)
        for count in {1, block, block + 1, 2 * block - 1}:
            rng, rows = np.random.default_rng([number, count]), 2 * block
            chosen = [rng.permutation(rows)[:count].tolist() for _ in range(2)]
            case = RowCase(entries, *chosen, rows=rows)
            wanted = case.expected()
            cuda.launch(far(case.what()), "cpu")
            found = [target.tobytes() for target in case.targets]
            assert found == wanted, (widths, gap, count)
    assert seen == set(cuda.WORDS) == {16, 8, 4, 2, 1}
    print("kernel agrees")


# ---------------------------------------------------------------- machine code, from ptxas


class Driver:
    """Triton's driver on a machine without a GPU: kernels are compiled for Hopper and kept."""

    def __init__(self) -> None:
        self.utils = self
        self.loaded: list[bytes] = []

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *_: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 228 << 10}

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[Any, ...]:
        self.loaded.append(binary)
        return self, None, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass


TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    for tool in ("ptxas", "cuobjdump", "nvdisasm"):
        if not (TOOLS / tool).exists():
            pytest.skip(f"this Triton has no {tool}: machine code for GPUs is NOT checked here")
    made = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setattr(triton.runtime.driver, "_active", made)
        yield made
        cuda.copy_rows.device_caches.clear()


def one_row(word: int, width: int = 0, rows: int = 1, entries: int = 1) -> RowCopy:
    """Rows of that width at addresses that are multiples of `word`, and of nothing larger."""
    column = np.full(entries, word, np.int64)
    number = np.arange(rows)
    return RowCopy(column, column, column, column, column * 0 + (width or word), number, number)


def accesses(binary: bytes, folder: Path) -> list[str]:
    """The instructions of a kernel that touch memory: global (LDG, STG) or local, a spill."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    command = [TOOLS / "cuobjdump", "-sass", path]
    env = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return re.findall(r"\b(?:LD|ST)[GL]?\.?[\w.]*", done.stdout)


@pytest.fixture(scope="module")
def compiled(driver: Driver) -> dict[int, bytes]:
    """Each size of word -> the kernel that a first copy of it loads."""
    for word in cuda.WORDS:
        cuda.launch(one_row(word), "cpu")
    assert len(driver.loaded) == len(cuda.WORDS)
    return dict(zip(cuda.WORDS, driver.loaded, strict=True))


@pytest.mark.parametrize("word", cuda.WORDS)
def test_nothing_spills_and_words_are_moved_whole(
    compiled: dict[int, bytes], word: int, tmp_path: Path
) -> None:
    found = accesses(compiled[word], tmp_path)
    size = {16: ".128", 8: ".64", 4: "", 2: ".U16", 1: ".U8"}[word]
    assert {name for name in found if name.startswith("ST")} == {f"STG.E{size}"}
    loads = {name for name in found if name.startswith("LD")}
    assert loads - {"LDC", "LDC.64"} == {f"LDG.E{size}", "LDG.E.64"}, "entries and rows are int64"


def test_no_copy_compiles_what_the_first_of_its_word_has_not(
    compiled: dict[int, bytes], driver: Driver
) -> None:
    """Triton by itself compiles variants for a count of 1, for multiples of 16 and for others."""
    for word in cuda.WORDS:
        for width in (word, 16 * word, 128, 8192, 65536):
            for rows, entries in ((1, 1), (2, 16), (16, 61), (33, 1), (4096, 2)):
                cuda.launch(one_row(word, width, rows, entries), "cpu")
    assert len(driver.loaded) == len(compiled)


# ---------------------------------------------------------------- streams


@pytest.fixture
def streams() -> Iterator[Streams]:
    with Streams() as made:
        yield made


def test_memory_is_not_cleared_once_it_can_be_written(streams: Streams) -> None:
    """Whatever the caller's stream does meanwhile, which nobody waits for."""
    rows, source = cuda.CudaRows(0), noise(64)
    memory = rows.allocate(64)
    assert memory.owner.tolist() == [0] * 64, "zeroed, as Clearer needs it, and at once"
    ends = ints(source.ctypes.data), ints(memory.address)
    rows.copy(RowCopy(*ends, ints(64), ints(64), ints(64), ints(0), ints(0)))
    streams.finish()
    assert bytes(rows.read(memory, 64)) == source.tobytes()
    (own,) = set(streams.waited)
    assert own is not streams
    assert own.priority == -1, "SGLang's are of priority 0, and can be the same as others of it"


def test_buffers_come_from_the_pool_by_one_thread_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.cuda.use_mem_pool raises where another thread allocates in the same pool."""
    pool, inside, made = object(), [], []

    @contextlib.contextmanager
    def use(given: object, device: torch.device) -> Iterator[None]:
        assert (given, device.index, inside) == (pool, 1, [])
        inside.append(1)
        time.sleep(0.01)
        yield
        inside.pop()

    def zeros(size: int, **_: Any) -> torch.Tensor:
        made.append(len(inside))
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(cuda.CudaRows, "_own_stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", zeros)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(cuda.CudaRows(1, pool).allocate, [64] * 8))
    cuda.CudaRows(1).allocate(64)
    assert made == [1] * 8 + [0]


# ---------------------------------------------------------------- warm-up and errors


def test_warming_up_tries_words_of_every_size(streams: Streams, monkeypatch) -> None:
    tried = []
    monkeypatch.setattr(
        cuda,
        "launch",
        lambda what, _: (tried.append(cuda.word_bytes(what)), streams.launch(what, _)),
    )
    cuda.CudaRows(0).warm_up()
    assert tried == list(cuda.WORDS)


def raising(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (raising(RuntimeError("Failed to find C compiler")), "RuntimeError: Failed to find C comp"),
        (raising(torch.cuda.OutOfMemoryError("CUDA out of memory.")), "MemoryError: CUDA out of"),
        (lambda *_: None, "a copy with wrong bytes"),
    ],
)
def test_what_cannot_copy_rows_is_refused(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, launch: Any, words: str
) -> None:
    monkeypatch.setattr(cuda, "launch", launch)
    with pytest.raises(MixKVError, match=f"copies rows on cuda:0; got {words}"):
        cuda.CudaRows(0).warm_up()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
            MemoryError,
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), MemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
    ],
)
def test_too_little_memory_is_a_memory_error_and_nothing_else_is(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type
) -> None:
    rows = cuda.CudaRows(0)
    monkeypatch.setattr(cuda, "launch", raising(error))
    monkeypatch.setattr(torch, "zeros", raising(error))
    for call in (lambda: rows.copy(one_row(8)), lambda: rows.allocate(8)):
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind


if __name__ == "__main__":
    compare_kernel_with_a_plain_loop()
