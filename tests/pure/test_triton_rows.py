"""The Triton kernel of scripts/gpu/triton_rows.py without a GPU: its bytes, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: the kernel is not tested")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "gpu"))
import triton_rows
from triton_rows import RowCopy

sys.path.pop(0)


def test_the_kernel_copies_as_a_plain_loop_does_in_tritons_interpreter() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
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
FAR = 1 << 31  # row numbers, and so distances, that 32 bits do not hold


def noise(rows: int, strides: list[int], seed: int) -> list[np.ndarray]:
    """Memory of each entry, at an address that is a multiple of 16."""
    random = np.random.default_rng(seed)
    memory = [random.integers(0, 256, rows * stride + 16, np.uint8) for stride in strides]
    pairs = zip(memory, strides, strict=True)
    return [one[-one.ctypes.data % 16 :][: rows * stride] for one, stride in pairs]


def compare_kernel_with_a_plain_loop() -> None:
    """The body of the test above. Row counts: one, a full block, one more, and not quite two."""
    seen = set()
    for number, (widths, gap) in enumerate(SHAPES):
        src_stride = [width + gap for width in widths]
        dst_stride = [width + i * gap for i, width in enumerate(widths)]
        strides = np.array(src_stride), np.array(dst_stride), np.array(widths)
        word = next(
            w for w in triton_rows.WORDS if not np.bitwise_or.reduce(np.hstack(strides)) % w
        )
        block = triton_rows.variant(word)["BLOCK"]
        seen.add(word)
        for count in {1, block, block + 1, 2 * block - 1}:
            rows, random = 2 * block, np.random.default_rng([number, count])
            src, dst = noise(rows, src_stride, number), noise(rows, dst_stride, number + 99)
            chosen = [random.permutation(rows)[:count] for _ in range(2)]
            wanted = [entry.copy() for entry in dst]
            for e, width in enumerate(widths):
                for n, m in zip(*chosen, strict=True):
                    row = src[e][n * src_stride[e] :][:width]
                    wanted[e][m * dst_stride[e] :][:width] = row
            ends = [np.array([entry.ctypes.data for entry in side]) for side in (src, dst)]
            ends = [end - FAR * stride for end, stride in zip(ends, strides[:2], strict=True)]
            what = RowCopy(*ends, *strides, *(numbers + FAR for numbers in chosen))
            assert triton_rows.word_bytes(what) == word
            triton_rows.prepared(what, "cpu")()
            assert all(map(np.array_equal, dst, wanted)), (widths, gap, count)
    assert seen == set(triton_rows.WORDS) == {16, 8, 4, 2, 1}
    print("kernel agrees")


if __name__ == "__main__":
    compare_kernel_with_a_plain_loop()
