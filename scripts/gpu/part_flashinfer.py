"""Decode attention over unpacked draft pages equals attention over the single server's.

A request's draft KV is in a pool of one unsharded server. Prefill ranks have it in pools with other
pages and other page sizes, each its heads. The product packs it there and unpacks it on the decode
ranks, and FlashInfer attends to both, as SGLang's backends on a GPU read a pool of [rows, heads,
head size]:

    rows    a row is a page (flashinfer_backend.py: page size 1)
    pages   the same memory as [pages, page size, heads, head size] (paged_kv_view in
            flashattention_backend.py and trtllm_mha_backend.py)

The outputs have to be equal bit by bit. Where two heads have changed places, or one row has not
been unpacked, they must not be: else nothing was shown. The single server's output is compared with
plain attention in float32, so what FlashInfer reads is what was meant. Without a GPU the same runs
with plain attention in FlashInfer's place.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scene
import torch
from parts import Found, Lacks, Record, Wrong
from torch import Tensor

from sglang_mixkv.draft.rows import DraftRows, Staging

PAGE, PREFILL_PAGE = 16, 64
TOKENS = {"cuda": (1, 130, 1000), "cpu": (1, 40, 70)}  # of the requests of one batch
SIZES = ((2, 1), (1, 2), (4, 2))  # attention-TP of prefill and decode
GROUP = 4  # query heads of a KV head
WORKSPACE = 128 << 20
NEAR = 2e-2  # of bf16 and fp8 to float32, of values around 1
Tokens = tuple[int, ...]
# queries [batch, heads, head size], K and V as pages, page numbers and tokens of each request
Attend = Callable[[Tensor, Tensor, Tensor, list[Any], list[int]], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, pages: list[Any], tokens: list[int]) -> Tensor:
    """Attention as the formula has it."""
    outputs = []
    for query, numbers, count in zip(q.float(), pages, tokens, strict=True):
        at = torch.as_tensor(numbers, device=k.device)
        keys, values = (c.float()[at].flatten(0, 1)[:count] for c in (k, v))
        keys, values = (c.repeat_interleave(GROUP, 1) for c in (keys, values))
        scores = torch.einsum("hd,thd->ht", query, keys) / scene.HEAD**0.5
        outputs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
    return torch.stack(outputs).to(q.dtype)


def flashinfer_here() -> Attend:
    """FlashInfer's. It compiles itself at the first call. As SGLang's backend it takes the kernels
    fa2, and those for tensor cores: from GROUP query heads a KV head on, and for fp8."""
    try:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    except Exception as error:
        raise Lacks(f"a FlashInfer that can be imported: {error!r}") from None
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, pages: list[Any], tokens: list[int]) -> Tensor:
        size = k.shape[1]
        counts = torch.tensor([0, *map(len, pages)], dtype=torch.int32)
        last = torch.tensor([(count - 1) % size + 1 for count in tokens], dtype=torch.int32)
        numbers = torch.from_numpy(np.concatenate(pages)).to("cuda", torch.int32)
        wrapper.plan(
            counts.cumsum(0, dtype=torch.int32).cuda(), numbers, last.cuda(), q.shape[1],
            k.shape[2], scene.HEAD, size, q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        return wrapper.run(q, (k, v))

    return attend


def as_pages(entry: Tensor, page: int) -> Tensor:
    """Rows of [heads, head size] as SGLang's backends see them: [pages, page size, ...]."""
    return entry.view(-1, page, *entry.shape[1:])


class Rank:
    """Heads of all requests in a pool of its own, each request in pages of its own."""

    def __init__(
        self, heads: range, page: int, pool: list[Tensor], tokens: Tokens, seed: int
    ) -> None:
        counts = [-(-count // page) for count in tokens]
        order = np.random.default_rng(seed).permutation(sum(counts))
        self.pages = np.split(order, np.cumsum(counts)[:-1])
        self.heads, self.page, self.pool, self._tokens = heads, page, pool, tokens
        self.draft = DraftRows(pool, heads, by_numpy=False)

    def rows(self, request: int) -> Any:
        rows = self.pages[request][:, None] * self.page + np.arange(self.page)
        return rows.ravel()[: self._tokens[request]]


class Case:
    """A single server, and the ranks of a pair that has its draft KV."""

    def __init__(self, drafter: scene.Drafter, dtype: str, sizes: tuple[int, int], device: Any):
        self.name = f"{drafter.name}, {dtype}, {sizes[0]} -> {sizes[1]}"
        self._drafter, self._dtype, self.device = drafter, dtype, device
        self.tokens = TOKENS[device.type]
        self.single = self._rank(0, 1, PAGE, 1)
        self._prefill = [self._rank(rank, sizes[0], PREFILL_PAGE, 2) for rank in range(sizes[0])]
        self.decode = [self._rank(rank, sizes[1], PAGE, 3) for rank in range(sizes[1])]
        for source, request in itertools.product(self._prefill, range(len(self.tokens))):
            heads = slice(source.heads.start, source.heads.stop)
            pools = map(scene.as_bytes, (source.pool, self.single.pool))
            for entry, truth in zip(*pools, strict=True):
                entry[source.rows(request)] = truth[self.single.rows(request)][:, heads]

    def _rank(self, rank: int, tp: int, page: int, seed: int) -> Rank:
        drafter, count = self._drafter, self._drafter.heads // tp
        rows = sum(-(-tokens // page) * page for tokens in self.tokens)
        pool = scene.pool(drafter.layers, count, rows, self._dtype, self.device, seed + 10 * rank)
        return Rank(range(rank * count, (rank + 1) * count), page, pool, self.tokens, seed)

    def transfer(self) -> None:
        """The product packs and unpacks."""
        size = self._prefill[0].draft.packed_bytes(max(self.tokens), self._drafter.heads)
        slot = Staging(1, -(-size // 64) * 64, self.device).slot(0)
        for source, target in itertools.product(self._prefill, self.decode):
            first = max(source.heads.start, target.heads.start)
            heads = range(first, min(source.heads.stop, target.heads.stop))
            for request in range(len(self.tokens) if heads else 0):
                source.draft.pack(source.rows(request), heads, slot, 1)
                target.draft.unpack(target.rows(request), heads, slot)

    def outputs(self, attend: Attend, rank: Rank, page: int, seed: int) -> list[Tensor]:
        """Attention to these heads of this rank, by layer, of the pool as pages of that size."""
        random = torch.Generator(self.device).manual_seed(seed)
        shape = (len(self.tokens), GROUP * len(rank.heads), scene.HEAD)
        q = torch.randn(shape, generator=random, device=self.device, dtype=torch.bfloat16)
        pages = rank.pages if page > 1 else [rank.rows(n) for n in range(len(self.tokens))]
        views = [as_pages(entry, page) for entry in rank.pool]
        layers = self._drafter.layers
        return [
            attend(q, views[n], views[n + layers], pages, list(self.tokens)) for n in range(layers)
        ]

    def same_heads(self, rank: Rank) -> Rank:
        """The single server's rows of this rank's heads alone."""
        heads = slice(rank.heads.start, rank.heads.stop)
        pool = [entry[:, heads].contiguous() for entry in self.single.pool]
        return Rank(rank.heads, PAGE, pool, self.tokens, 1)


def changed(rank: Rank) -> Iterator[str]:
    """K of its first layer with a fault at a time."""
    entry, rows = scene.as_bytes(rank.pool)[0], rank.rows(1)
    before = entry.clone()
    entry[:, [0, 1]] = before[:, [1, 0]]
    yield "heads have changed places"
    entry.copy_(before)
    entry[rows[20]] = before[rows[21]]
    yield "a row is another's"
    entry.copy_(before)


def checked(case: Case, attend: Attend) -> Record:
    """Raises Wrong unless all outputs are equal, and those of a wrong pool are not."""
    case.transfer()
    record: Record = {"case": case.name, "equal": 0, "from plain attention": 0.0}
    for rank, page in itertools.product(case.decode, (1, PAGE)):
        single, where = case.same_heads(rank), f"{case.name}, pages of {page}"
        wanted, found, formula = (
            case.outputs(by, of, page, 7)
            for by, of in ((attend, single), (attend, rank), (plain, single))
        )
        if not all(map(torch.equal, wanted, found)):
            raise Wrong(f"{where}: attention differs from the single server's")
        pairs = zip(wanted, formula, strict=True)
        far = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
        if not far < NEAR:
            raise Wrong(f"{where}: {far:.3f} from plain attention")
        record["equal"] += len(found)
        record["from plain attention"] = max(record["from plain attention"], far)
    rank = case.decode[0]
    wanted, *_ = case.outputs(attend, rank, PAGE, 7)
    for fault in changed(rank):
        if torch.equal(case.outputs(attend, rank, PAGE, 7)[0], wanted):
            raise Wrong(f"{case.name}: the same attention where {fault}: nothing was shown")
    return record


def run(options: argparse.Namespace) -> Found:
    device = scene.device_of(options)
    attend = plain if device.type == "cpu" else flashinfer_here()
    cases: Any = itertools.product(scene.DRAFTERS, scene.DTYPES, SIZES)
    if device.type == "cpu":
        cases = zip(scene.DRAFTERS, itertools.cycle(scene.DTYPES), SIZES, strict=False)
    figures = [checked(Case(*case, device), attend) for case in cases]
    equal = sum(figure["equal"] for figure in figures)
    return Found(f"{equal} outputs equal the single server's bit by bit", figures)
