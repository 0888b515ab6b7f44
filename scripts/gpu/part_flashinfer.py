"""Scatter of head slices into a paged cache: the project's kernel beside FlashInfer's
`append_paged_kv_cache`, which takes a cache with strides of its own.

Both write the same K and V rows of some heads into the same pages of a pool with more heads. What
each wrote is compared with PyTorch's indexing. FlashInfer has no pack.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import kernels
import numpy as np
import torch
from common import geomean, interleave, ratio
from parts import Found, Lacks, Record, Wrong

from sglang_mixkv.rows import cuda
from sglang_mixkv.rows.host import RowCopy
from sglang_mixkv.rows.slices import rows_of

TOKENS = (1 << 10, 8 << 10, 32 << 10, 128 << 10)
HEADS, FIRST = 8, 1  # of a row in the pool; the slice's first one
SLICES = (1, 2, 4)  # heads of a slice
DIM = 128
PAGE_SIZES = (16, 64)


class Case:
    """K and V of one layer: a region of a slice's rows, and a pool with pages in random order."""

    def __init__(self, tokens: int, heads: int, page_size: int, seed: int) -> None:
        self.tokens, self.page_size = tokens, page_size
        count = tokens // page_size
        self.pages = np.random.default_rng(seed).permutation(count).astype(np.int64)
        shape = (count, page_size, HEADS, DIM)
        self.region = torch.randn(2, tokens, heads, DIM, device="cuda").to(torch.bfloat16)
        self.pool = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        self.parts = [cache[:, :, FIRST : FIRST + heads] for cache in self.pool]

    def clear(self) -> None:
        for cache in self.pool:
            cache.zero_()

    def is_right(self) -> bool:
        """The rows where they belong, and the other heads untouched."""
        place = torch.from_numpy(self.pages).cuda()
        for cache, part, rows in zip(self.pool, self.parts, self.region, strict=True):
            if not torch.equal(part[place].flatten(0, 1), rows):
                return False
            part.zero_()
            if cache.count_nonzero():
                return False
        return True

    def ours(self) -> Callable[[], Any]:
        head, count = DIM * self.region.element_size(), self.region.shape[2]
        one, entry = np.ones(2, np.int64), np.arange(2)
        what = RowCopy(
            self.region.data_ptr() + entry * self.tokens * count * head,
            np.array([part.data_ptr() for part in self.parts]),
            one * count * head, one * HEADS * head, one * count * head,
            range(self.tokens), rows_of(self.pages, self.page_size),
        )  # fmt: skip
        return cuda.prepared(what, "cuda")

    def theirs(self, append: Callable[..., None]) -> Callable[[], Any]:
        """FlashInfer's: one request, whose pages are these."""
        table = {"dtype": torch.int32, "device": "cuda"}
        tables = (
            torch.zeros(self.tokens, **table),  # the request of each row
            torch.arange(self.tokens, **table),  # its place in that request
            tuple(self.parts),
            torch.from_numpy(self.pages).to(**table),
            torch.tensor([0, len(self.pages)], **table),
            torch.tensor([self.page_size], **table),  # rows in its last page
        )
        return lambda: append(*self.region, *tables, kv_layout="NHD")


def append_of_flashinfer() -> Callable[..., None]:
    """Its function, once it has run: it compiles itself at the first call."""
    try:
        from flashinfer.page import append_paged_kv_cache
    except ImportError as error:
        name = error.name or "flashinfer"
        missing = "the package flashinfer" if name == "flashinfer" else f"flashinfer: {error}"
        raise Lacks(missing) from None
    except Exception as error:
        raise Lacks(f"a FlashInfer that can be imported: {error!r}") from None
    try:
        Case(64, 1, 16, 0).theirs(append_paged_kv_cache)()
        torch.cuda.synchronize()
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise Lacks(f"a FlashInfer that runs: {type(error).__name__}: {text[-1]}") from None
    return append_paged_kv_cache


def measure(case: Case, append: Callable[..., None], count: int) -> Record:
    launches = {"ours": case.ours(), "flashinfer": case.theirs(append)}
    for name, launch in launches.items():
        case.clear()
        launch()
        if not case.is_right():
            raise Wrong(f"{name}: wrong bytes of {case.tokens} x {case.region.shape[2]} heads")
    bursts = {name: kernels.Burst(launch) for name, launch in launches.items()}

    def sample(burst: kernels.Burst) -> Callable[[Any], None]:
        return lambda s: s.add(burst.on_device(), launch=burst.from_host())

    samples = interleave({name: sample(burst) for name, burst in bursts.items()}, count)
    size = case.region.numel() * case.region.element_size()
    return {
        "tokens": case.tokens, "heads": case.region.shape[2], "page_size": case.page_size,
        "bytes": size,
        **{f"{name} GB/s": size / float(np.median(s.total)) / 1e9 for name, s in samples.items()},
        **{f"{name} launch us": float(np.median(s.parts["launch"]) * 1e6)
           for name, s in samples.items()},
        "times as fast": ratio(samples["flashinfer"], samples["ours"]),
    }  # fmt: skip


def run(options: argparse.Namespace) -> Found:
    torch.cuda.set_device(options.gpu)
    append = append_of_flashinfer()
    tokens = [count for count in TOKENS if count <= options.tokens]
    records = [
        measure(Case(*case, options.seed), append, options.repeats)
        for case in product(tokens, SLICES, PAGE_SIZES)
    ]
    if not records:
        raise Lacks("a size to try: --tokens is less than the smallest")
    times = [record["times as fast"] for record in records]
    mean = geomean(times)
    faster = "the project's kernel" if mean > 1 else "FlashInfer"
    says = (
        f"{faster} is faster on strided head slices: the project's takes 1/{mean:.2f} of "
        f"FlashInfer's time in the mean, 1/{min(times):.2f} at worst, 1/{max(times):.2f} at best"
    )
    return Found(says, records, records)
