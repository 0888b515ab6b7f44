"""Attention over unpacked draft pages is the single server's, bit by bit.

A request's draft KV is in a pool of one unsharded server. Prefill ranks have it in pools with other
pages, each its heads. The product packs it there and unpacks it on the decode ranks, and FlashInfer
attends to both, as SGLang's backends on a GPU read a pool: with a row as a page
(flashinfer_backend.py), and the same memory as pages of rows (paged_kv_view in
flashattention_backend.py and trtllm_mha_backend.py).

The single server's output is compared with plain attention in float32, so what FlashInfer reads is
what was meant. On the CPU plain attention stands in for FlashInfer. The controls: where two heads
have changed places, or a row is another's, outputs have to differ.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_mixkv.draft.rows import DraftRows, Staging

from .pools import DRAFTERS, DTYPES, HEAD, STAMP, Drafter, as_bytes, pool, settle

PAGE, PREFILL_PAGE = 16, 64
TOKENS = {"cuda": (1, 130, 1000), "cpu": (1, 40, 70)}  # of the requests of one batch
GROUP = 4  # query heads of a KV head
NEAR = 2e-2  # of bf16 and fp8 to float32, of values around 1
# queries [batch, heads, head size], K and V as pages, page numbers and tokens of each request
Attend = Callable[[Tensor, Tensor, Tensor, list[Any], tuple[int, ...]], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, pages: list[Any], tokens: tuple[int, ...]) -> Tensor:
    """Attention as the formula has it."""
    outputs = []
    for query, numbers, count in zip(q.float(), pages, tokens, strict=True):
        at = torch.as_tensor(numbers, device=k.device)
        keys, values = (c.float()[at].flatten(0, 1)[:count] for c in (k, v))
        keys, values = (c.repeat_interleave(GROUP, 1) for c in (keys, values))
        scores = torch.einsum("hd,thd->ht", query, keys) / HEAD**0.5
        outputs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
    return torch.stack(outputs).to(q.dtype)


@pytest.fixture
def attend(device: torch.device) -> Attend:
    """FlashInfer's on a GPU. It compiles itself at the first call. As SGLang's backend it takes the
    kernels fa2, and those for tensor cores."""
    if device.type == "cpu":
        return plain
    found = pytest.importorskip("flashinfer.decode")
    nvcc = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    if not (shutil.which("nvcc") or os.path.exists(nvcc)):
        pytest.skip("no nvcc, with which FlashInfer compiles its kernels")
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    wrapper = found.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )

    def run(q: Tensor, k: Tensor, v: Tensor, pages: list[Any], tokens: tuple[int, ...]) -> Tensor:
        counts = torch.tensor([0, *map(len, pages)], dtype=torch.int32)
        last = torch.tensor([(n - 1) % k.shape[1] + 1 for n in tokens], dtype=torch.int32)
        numbers = torch.from_numpy(np.concatenate(pages)).to(device, torch.int32)
        wrapper.plan(
            counts.cumsum(0, dtype=torch.int32).to(device), numbers, last.to(device), q.shape[1],
            k.shape[2], HEAD, k.shape[1], q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        output: Tensor = wrapper.run(q, (k, v))
        return output

    return run


class Rank(NamedTuple):
    """Heads of all requests in a pool of its own, and each request's pages and rows."""

    draft: DraftRows
    pool: list[Tensor]
    pages: list[Any]
    rows: list[Any]


def new_rank(entries: list[Tensor], heads: range, page: int, tokens: tuple[int, ...]) -> Rank:
    counts = [-(-count // page) for count in tokens]
    order = np.random.default_rng(page + heads.start).permutation(sum(counts))
    pages = np.split(order, np.cumsum(counts)[:-1])
    rows = [
        (numbers[:, None] * page + np.arange(page)).ravel()[:count]
        for numbers, count in zip(pages, tokens, strict=True)
    ]
    return Rank(DraftRows(entries, heads, by_numpy=False), entries, pages, rows)


def outputs(attend: Attend, rank: Rank, page: int, tokens: tuple[int, ...]) -> list[Tensor]:
    """Attention to a rank's heads by layer, of its pool as pages of that size."""
    device, layers = rank.pool[0].device, len(rank.pool) // 2
    shape = (len(tokens), GROUP * len(rank.draft.heads), HEAD)
    random = torch.Generator(device).manual_seed(7)
    q = torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)
    k_and_v = [entry.view(-1, page, *entry.shape[1:]) for entry in rank.pool]
    pages = rank.pages if page > 1 else rank.rows
    return [attend(q, k_and_v[n], k_and_v[n + layers], pages, tokens) for n in range(layers)]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_outputs_are_the_single_servers(
    device: torch.device, attend: Attend, drafter: Drafter, dtype: str, sizes: tuple[int, int],
    figures: Callable[..., None],
) -> None:  # fmt: skip
    """At these attention-TP sizes of prefill and decode."""
    tokens, far, equal = TOKENS[device.type], 0.0, 0

    def ranks(tp: int, page: int, seed: int) -> list[Rank]:
        held, step = sum(-(-n // page) * page for n in tokens), drafter.heads // tp
        pools = [pool(drafter.layers, step, held, dtype, device, seed + n) for n in range(tp)]
        return [
            new_rank(entries, range(n * step, (n + 1) * step), page, tokens)
            for n, entries in enumerate(pools)
        ]

    (single,), sources = ranks(1, PAGE, 1), ranks(sizes[0], PREFILL_PAGE, 10)
    targets, requests = ranks(sizes[1], PAGE, 20), range(len(tokens))
    size = single.draft.packed_bytes(max(tokens), drafter.heads)
    slot = Staging(1, -(-size // 64) * 64, device).slot(0)
    for source, request in product(sources, requests):
        mine = source.draft.heads
        for to, of in zip(as_bytes(source.pool), as_bytes(single.pool), strict=True):
            to[source.rows[request]] = of[single.rows[request]][:, mine.start : mine.stop]
        for target in targets:
            first, stop = target.draft.heads.start, target.draft.heads.stop
            if heads := range(max(mine.start, first), min(mine.stop, stop)):
                settle()  # copies wait for no stream, and these rows are torch's default one's
                source.draft.pack(source.rows[request], heads, slot, STAMP)
                target.draft.unpack(target.rows[request], heads, slot, STAMP)
    for target, page in product(targets, (1, PAGE)):
        heads = target.draft.heads
        of_heads = [entry[:, heads.start : heads.stop].contiguous() for entry in single.pool]
        alone = Rank(DraftRows(of_heads, heads, False), of_heads, single.pages, single.rows)
        wanted, formula = (outputs(by, alone, page, tokens) for by in (attend, plain))
        assert all(map(torch.equal, wanted, outputs(attend, target, page, tokens)))
        pairs = zip(wanted, formula, strict=True)
        far = max(far, *(float((a.float() - b.float()).abs().max()) for a, b in pairs))
        equal += len(wanted)
    figures(equal=equal, from_plain_attention=far)
    assert far < NEAR
    entry, rows = as_bytes(targets[0].pool)[0], targets[0].rows[1]
    right, before = outputs(attend, targets[0], PAGE, tokens)[0], entry.clone()
    entry[:, [0, 1]] = before[:, [1, 0]]
    assert not torch.equal(outputs(attend, targets[0], PAGE, tokens)[0], right), "heads are seen"
    entry.copy_(before)
    entry[rows[20]] = before[rows[21]]
    assert not torch.equal(outputs(attend, targets[0], PAGE, tokens)[0], right), "rows are seen"
