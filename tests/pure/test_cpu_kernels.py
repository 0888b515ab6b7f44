"""The CPU engine's attention kernels agree with a plain reference.

The accept lengths of the pairs in tests/e2e test the engine's other kernels.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mixkv_cpu.kernels import attention

SCALE = 0.3
POOL = 40


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def reference(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, window: int) -> Tensor:
    """Compute the attention of a request's last len(q) positions. Its KV is in these slots."""
    at = torch.arange(len(slots))
    behind = at[-len(q) :, None] - at
    seen = (behind >= 0) & ((behind < window) | (window == 0))
    heads_first = [x.transpose(0, 1) for x in (q, k[slots], v[slots])]
    made = scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=SCALE, enable_gqa=True)
    return made.transpose(0, 1)


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
@pytest.mark.parametrize("given", [True, False], ids=["with k and v", "from the cache"])
@pytest.mark.parametrize("new", [(2, 4, 4), (1, 1, 1)], ids=["extend", "decode"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "mla"),
    [(4, 4, 8, 8, False), (4, 2, 8, 6, False), (4, 1, 8, 5, True)],
    ids=["mha", "gqa", "mla"],
)
def test_attention(heads, kv_heads, width, value_width, mla, new, given, window) -> None:
    """Attention equals the reference, whether k and v come as arguments or from the cache.

    A decode step also stores the given k and v in the cache.
    """
    kv = Cache(kv_heads, width, value_width, mla)
    tokens = torch.cat([kv.slots(i)[-n:] for i, n in enumerate(new)])
    k, v = (x[tokens].flatten(1) if given else None for x in (kv.k, kv.v))
    stored_k = kv.k.clone()
    stored_v = stored_k[..., :value_width] if mla else kv.v.clone()
    if given:
        stored_k[tokens] = stored_v[tokens] = float("nan")
    q, out = torch.randn(sum(new), heads, width), torch.empty(sum(new), heads, value_width)
    cache, rule = (stored_k, stored_v, 1.0, 1.0), (SCALE, 0.0, False, window, None, None)
    table = kv.req_to_token, kv.rows, torch.tensor(kv.lengths)
    if new == (1, 1, 1):
        attention.decode_attention_cpu(q, *cache, out, k, v, tokens, torch.empty(0), *table, *rule)
        torch.testing.assert_close((stored_k, stored_v), (kv.k, kv.v))
    else:
        spans = torch.tensor(new), torch.tensor([0, *accumulate(new)][:3]), max(new)
        attention.extend_attention_cpu(q, k, v, out, *cache, *table, *spans, *rule, None, True)
    parts = zip(q.split(new), range(3), strict=True)
    want = torch.cat([reference(x, kv.k, kv.v, kv.slots(i), window) for x, i in parts])
    torch.testing.assert_close(out, want)
