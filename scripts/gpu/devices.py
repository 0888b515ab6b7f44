"""Rows where the check runs: on a GPU, or in this process with the kernel in Triton's interpreter.

rows                what the product copies with
put(buffer, bytes)  their bytes into memory of the rows, for any stream to see
get(buffer)         all bytes of it
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from sglang_mixkv.rows.host import Buffer, HostRows, RowCopy, Rows

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Interpreted(HostRows):
    """Rows of this process, which the kernel copies."""

    def copy(self, what: RowCopy) -> None:
        from sglang_mixkv.rows import cuda

        if len(what.src_rows) and len(what.src):
            cuda.launch(what, "cpu")


class HostDevice:
    """No GPU: this process's memory."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def put(self, buffer: Buffer, data: Bytes) -> None:
        buffer.owner[: len(data)] = data

    def get(self, buffer: Buffer) -> Bytes:
        return np.array(buffer.owner)


class CudaDevice:
    """One GPU, which becomes the current one."""

    def __init__(self, number: int) -> None:
        import torch

        from sglang_mixkv.rows.cuda import CudaRows

        torch.cuda.set_device(number)
        self.number = number
        self.rows: Rows = CudaRows(number)

    def put(self, buffer: Buffer, data: Bytes) -> None:
        import torch

        buffer.owner[: len(data)].copy_(torch.from_numpy(data))
        torch.cuda.synchronize(self.number)

    def get(self, buffer: Buffer) -> Bytes:
        import torch

        torch.cuda.synchronize(self.number)
        return buffer.owner.cpu().numpy()


Device = HostDevice | CudaDevice


def here(options: argparse.Namespace, host_rows: type[HostRows] = HostRows) -> Device:
    """The device that the options name; `host_rows` copy where that is the CPU."""
    if options.device == "cuda":
        return CudaDevice(options.gpu)
    return HostDevice(host_rows())
