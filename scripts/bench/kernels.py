"""Pack and scatter kernels on an NVIDIA GPU, against a device copy of the same bytes.

Without CUDA it says what it lacks and exits 0. One line per kind, layout, number of tokens and
width of a slice. One sample is the time between two CUDA events around a burst of launches, which
is a CUDA graph where `GB/s` is meant, and started one by one from the host for `launch us`. `GB/s`
counts each byte once, as for the copy. `call` is the product's whole call, from the host, with its
uploads and its wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from common import Check, Record, Result, elapsed, interleave, options, ratio, repeats

LEAST_SHARE = 0.8
FROM_BYTES = 128 << 20  # of a copy that is judged: twice what the largest L2 caches hold
ENTRIES = 2  # K and V of one layer
# Bytes of a slice: one to 16 heads of 64 or 128 in 1 or 2 bytes; MLA's rows (656: fp8 with its
# scales, 1152: bf16); 132, DeepSeek's index keys, in words of 4.
WIDTHS = (64, 128, 132, 256, 512, 656, 1024, 1152, 2048, 4096, 8192)
FAN = 4  # slices a full row
BURST = 20
BUSY_CYCLES = 200_000  # some 0.1 ms, in which the host starts a graph


def lacking() -> str:
    """What this machine lacks; empty if nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1)"
    try:
        import torch
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        return f"the package {error.name} is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device, or a PyTorch built without CUDA"
    return ""


def row_copy(kind: str, strided: Any, packed: Any, tokens: int, width: int, layout: str) -> Any:
    """Pack (strided rows -> packed) or scatter (packed -> strided rows), the second slice of a
    row, tokens in order or in random pages of 64."""
    from sglang_mixkv.rows.host import RowCopy

    pages = np.arange(tokens // 64)
    if layout == "random":
        pages = np.random.default_rng(3).permutation(pages)
    rows = (pages[:, None] * 64 + np.arange(64)).ravel()
    entry, order = np.arange(ENTRIES), np.arange(tokens)
    wide = strided.data_ptr() + entry * tokens * FAN * width + width
    dense = packed.data_ptr() + entry * tokens * width
    strides = np.full(ENTRIES, FAN * width), np.full(ENTRIES, width)
    widths = np.full(ENTRIES, width)
    if kind == "pack":
        return RowCopy(wide, dense, strides[0], strides[1], widths, rows, order)
    return RowCopy(dense, wide, strides[1], strides[0], widths, order, rows)


class Burst:
    """So many launches of one thing on the current device, timed on it: seconds of one."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        """`launch` has run before: what it compiles cannot be part of a graph."""
        import torch

        self._launch, self._graph = launch, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._launch_all()

    def _launch_all(self) -> None:
        for _ in range(BURST):
            self._launch()

    def on_device(self) -> float:
        """The host starts all of them at once, while the device is busy with something else."""
        import torch

        torch.cuda._sleep(BUSY_CYCLES)
        return _between_events(self._graph.replay) / BURST

    def from_host(self) -> float:
        """The host starts each."""
        return _between_events(self._launch_all) / BURST


def _between_events(start_work: Callable[[], Any]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    start_work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(kind: str, tokens: int, width: int, layout: str, count: int, device: int = 0) -> Record:
    """Kernel, whole call and device copy of the same bytes; raises if bytes are wrong. `device`:
    the current one."""
    import torch

    from sglang_mixkv.rows import cuda

    size = ENTRIES * tokens * width
    strided = torch.randint(0, 255, (FAN * size,), dtype=torch.uint8, device="cuda")
    packed = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    copy_to = torch.empty_like(packed)
    what, rows = row_copy(kind, strided, packed, tokens, width, layout), cuda.CudaRows(device)
    torch.cuda.synchronize()  # rows are copied on a stream of their own
    rows.copy(what)
    _check(kind, strided, packed, what, tokens, width)
    kernel, copy = Burst(cuda.prepared(what, "cuda")), Burst(lambda: copy_to.copy_(packed))
    methods = {
        "device copy": lambda s: _add_copy(s, copy),
        "kernel": lambda s: s.add(kernel.on_device(), launch=kernel.from_host()),
        "call": lambda s: s.add(elapsed(lambda: rows.copy(what))),
    }
    samples = interleave(methods, count)
    launches = {name: np.median(s.parts["launch"]) for name, s in samples.items() if s.parts}
    return {
        "kind": kind, "layout": layout, "tokens": tokens, "width": width,
        "word": cuda.word_bytes(what), "bytes": size,
        **{f"{name} GB/s": size / float(np.median(s.total)) / 1e9 for name, s in samples.items()},
        "share_of_copy": 1 / ratio(samples["kernel"], samples["device copy"]),
        **{f"{name} launch us": float(seconds * 1e6) for name, seconds in launches.items()},
        "call us": float(np.median(samples["call"].total) * 1e6),
    }  # fmt: skip


def _add_copy(samples: Any, copy: Burst) -> None:
    """Some large copies take twice as long in a graph (pytorch/pytorch#191284)."""
    alone, launch = copy.on_device(), copy.from_host()
    samples.add(min(alone, launch), launch=launch)


def _check(kind: str, strided: Any, packed: Any, what: Any, tokens: int, width: int) -> None:
    wide = strided.view(ENTRIES, tokens, FAN, width)[:, :, 1]
    import torch

    rows = torch.from_numpy(what.src_rows if kind == "pack" else what.dst_rows).cuda()
    if not torch.equal(wide[:, rows], packed.view(ENTRIES, tokens, width)):
        raise RuntimeError(f"{kind} of {tokens} x {width} B: wrong bytes")


def judged(records: list[Record]) -> list[Record]:
    """Those in words of 16 bytes that are large enough for a bandwidth."""
    return [r for r in records if r["bytes"] >= FROM_BYTES and r["word"] == 16]


def checks(records: list[Record]) -> list[Check]:
    shares = [r["share_of_copy"] for r in judged(records)]
    name = f"kernels from {FROM_BYTES >> 20} MiB on, share of the device's copy: least"
    return [Check(name, LEAST_SHARE, min(shares), at_most=False)] if shares else []


def plot(result: Result, pyplot: Any) -> None:
    chosen = result.parts["rows"]
    for key in dict.fromkeys((r["kind"], r["layout"], r["tokens"]) for r in chosen):
        line = [r for r in chosen if (r["kind"], r["layout"], r["tokens"]) == key]
        label = "{} {} {:,} tokens".format(*key)
        pyplot.plot([r["width"] for r in line], [r["share_of_copy"] for r in line], label=label)
    pyplot.axhline(LEAST_SHARE, color="black", linewidth=0.5)
    pyplot.xscale("log")
    pyplot.xlabel("bytes of a slice")
    pyplot.ylabel("share of the device's copy bandwidth")
    pyplot.legend(fontsize=6)


def main() -> None:
    arguments = options((__doc__ or "").splitlines()[0]).parse_args()
    result = Result("kernels", arguments.quick, {"rows": []}, lacks=lacking())
    if not result.lacks:
        import torch

        result.machine["gpu"] = torch.cuda.get_device_name(0)
        cases = product(
            ("pack", "scatter"),
            (1024,) if arguments.quick else (1024, 8192, 65536),
            WIDTHS[:1] if arguments.quick else WIDTHS,
            ("contiguous", "random"),
        )
        result.parts["rows"] = [measure(*case, repeats(arguments)) for case in cases]
        result.checks = checks(result.parts["rows"])
    result.finish(arguments, lambda pyplot: plot(result, pyplot))


if __name__ == "__main__":
    main()
