"""Draft pools with SGLang's memory layout, requests' pages and rows in them, and a background load
for measurements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_mixkv.draft.layout import Pages

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Drafter(NamedTuple):
    name: str
    layers: int
    heads: int

    def __str__(self) -> str:
        return self.name


EAGLE3, DFLASH, DSPARK = Drafter("EAGLE3", 1, 8), Drafter("DFLASH", 6, 8), Drafter("DSPARK", 5, 16)
DRAFTERS = EAGLE3, DFLASH, DSPARK
HEAD = 128
SLOTS, SLOT = 64, {"cuda": 4 << 20, "cpu": 64 << 10}  # the default size, and a smaller one
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def pool(
    layers: int, heads: int, rows: int, dtype: str, device: Any, seed: int = 1
) -> list[Tensor]:
    """Make the entries of a pool: K of each layer, then V of each layer, [rows, heads, head size].
    As in SGLang, K and V of a layer are halves of one allocation (MHATokenToKVPool,
    _create_buffers_normal)."""
    random = torch.Generator(device).manual_seed(seed)
    drawn = {"dtype": torch.bfloat16, "device": device, "generator": random}
    both = [torch.randn((2, rows, heads, HEAD), **drawn).to(DTYPES[dtype]) for _ in range(layers)]
    return [halves[half] for half in (0, 1) for halves in both]


def pages_of(tokens: int, page_size: int) -> Ints:
    """Return a request's pages, in random order."""
    return np.random.default_rng(1).permutation(-(-tokens // page_size))


def rows_of(tokens: int, page_size: int, pages: Any = None) -> Ints:
    """Return the row numbers of a request's tokens. The last token may be inside a page."""
    pages = pages_of(tokens, page_size) if pages is None else pages
    return Pages(pages, page_size).rows(0, tokens)


def as_bytes(entries: list[Tensor]) -> list[Tensor]:
    return [entry.view(torch.uint8) for entry in entries]


def wrong_bytes(found: list[Tensor], wanted: list[Tensor]) -> int:
    pairs = zip(as_bytes(found), as_bytes(wanted), strict=True)
    return sum(int((one != other).sum()) for one, other in pairs)


def settle() -> None:
    """Wait until the GPU is idle, and release cached memory. Copies need this, since they do not
    wait for other streams."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def beside(work: Callable[[], Any]) -> Iterator[None]:
    """Repeat `work` in a thread until the block ends."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()
