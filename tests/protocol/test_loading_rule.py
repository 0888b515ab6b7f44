"""The ring splits heads over ranks by the same rule as SGLang's QKVParallelLinear."""

from __future__ import annotations

import pytest
import torch
from rig.ring.model import heads_of_rank

HEAD_SIZE = 2


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_a_rank_has_the_heads_that_sglang_loads(kv_heads: int, tp: int) -> None:
    from sglang.srt.layers.linear import QKVParallelLinear
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", tp_size=tp), role="tokenizer")
    whole = torch.arange(kv_heads).repeat_interleave(HEAD_SIZE)[:, None].float()
    for rank in range(tp):
        with get_parallel().override(tp_rank=rank):
            layer = QKVParallelLinear(
                1, HEAD_SIZE, 8, kv_heads, bias=False, params_dtype=torch.float32
            )
            layer.weight_loader(layer.weight, whole, "k")
        start = layer.num_heads * HEAD_SIZE
        loaded = layer.weight[start : start + layer.num_kv_heads * HEAD_SIZE, 0]
        heads = loaded[::HEAD_SIZE].int().tolist()
        assert heads == list(range(kv_heads))[heads_of_rank(kv_heads, tp, rank)]
