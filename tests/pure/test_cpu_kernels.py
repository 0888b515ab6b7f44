"""Attention of the CPU engine against plain loops. Its other kernels: the pairs' accept lengths in
tests/e2e, which has a host cache too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mixkv_cpu.kernels import attention

SCALE = 0.3
POOL = 40


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def reference(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, window: int) -> Tensor:
    """The last len(q) positions of one request, whose keys and values lie at ``slots``."""
    keys, values = (x[slots].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * SCALE
    at = torch.arange(len(slots))
    behind = at[-len(q) :, None] - at
    hidden = (behind < 0) | ((behind >= window) & (window > 0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


class Cache:
    """Three requests of 5, 9 and 4 tokens at shuffled slots of one KV cache."""

    lengths = (5, 9, 4)

    def __init__(self, kv_heads: int, width: int, value_width: int, mla: bool = False) -> None:
        self.k = torch.randn(POOL, kv_heads, width)
        self.v = self.k[..., :value_width] if mla else torch.randn(POOL, kv_heads, value_width)
        self.rows = torch.tensor([4, 0, 2])
        self.req_to_token = torch.randperm(POOL * 6).view(6, POOL).int() % POOL
        free = torch.randperm(POOL).int()
        for row, length in zip(self.rows.tolist(), self.lengths, strict=True):
            self.req_to_token[row, :length], free = free[:length], free[length:]

    def slots(self, request: int) -> Tensor:
        return self.req_to_token[self.rows[request], : self.lengths[request]].long()


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "mla"),
    [(4, 4, 8, 8, False), (4, 2, 8, 6, False), (4, 1, 8, 5, True)],
    ids=["mha", "gqa", "mla"],
)
class TestAttention:
    def test_decode(self, heads, kv_heads, width, value_width, mla, window) -> None:
        kv = Cache(kv_heads, width, value_width, mla)
        q, out = torch.randn(3, heads, width), torch.empty(3, heads, value_width)
        new_k = torch.randn(3, kv_heads, width)
        new_v = new_k[..., :value_width] if mla else torch.randn(3, kv_heads, value_width)
        loc = torch.stack([kv.slots(i)[-1] for i in range(3)])
        k, v = kv.k.clone(), kv.v.clone()
        k[loc], v[loc] = new_k, new_v
        table = (kv.req_to_token, kv.rows, torch.tensor(kv.lengths))
        new = (new_k.flatten(1), new_v.flatten(1), loc, torch.empty(0))
        attention.decode_attention_cpu(
            q, kv.k, kv.v, 1.0, 1.0, out, *new, *table, SCALE, 0.0, False, window, None, None
        )
        want = torch.cat([reference(q[i : i + 1], k, v, kv.slots(i), window) for i in range(3)])
        torch.testing.assert_close((out, kv.k, kv.v), (want, k, v))

    @pytest.mark.parametrize("given", [True, False], ids=["with k and v", "from the cache"])
    def test_extend(self, heads, kv_heads, width, value_width, mla, window, given) -> None:
        kv, new = Cache(kv_heads, width, value_width, mla), (2, 4, 4)
        tokens = torch.cat([kv.slots(i)[-n:] for i, n in enumerate(new)])
        k, v = (x[tokens].flatten(1) if given else None for x in (kv.k, kv.v))
        stored_k, stored_v = kv.k.clone(), kv.v.clone()
        if given:
            stored_k[tokens], stored_v[tokens] = float("nan"), float("nan")
        q, out = torch.randn(10, heads, width), torch.empty(10, heads, value_width)
        spans = (torch.tensor(kv.lengths), torch.tensor(new), torch.tensor([0, 2, 6]), 4)
        attention.extend_attention_cpu(
            *(q, k, v, out, stored_k, stored_v, 1.0, 1.0, kv.req_to_token, kv.rows, *spans),
            *(SCALE, 0.0, False, window, None, None, None, True),
        )
        parts = zip(q.split(new), range(3), strict=True)
        want = torch.cat([reference(x, kv.k, kv.v, kv.slots(i), window) for x, i in parts])
        torch.testing.assert_close(out, want)
