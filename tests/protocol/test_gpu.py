"""The pools of tests/gpu have the same memory layout as SGLang's."""

from __future__ import annotations

import pytest
import torch
from gpu import pools


@pytest.mark.parametrize("page", [1, 16, 64])
def test_pools_and_pages_are_sglangs(page: int) -> None:
    """K and V of a layer are halves of one allocation. An attention backend's pages are a view of
    the rows."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    layout = pytest.importorskip("sglang.srt.mem_cache.layout.paged_view")
    pool = MHATokenToKVPool(
        size=4 * page, page_size=page, dtype=torch.bfloat16, head_num=8, head_dim=pools.HEAD,
        layer_num=2, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    theirs = [*pool.k_buffer, *pool.v_buffer]
    made = pools.pool(2, 8, len(theirs[0]), "bf16", "cpu")
    for entry, mine in zip(theirs, made, strict=True):
        assert (entry.shape, entry.stride()) == (mine.shape, mine.stride())
        assert entry.storage_offset() == mine.storage_offset()
        entry.copy_(mine)
        paged = layout.paged_kv_view(entry, page, 8, pools.HEAD)
        assert torch.equal(mine.view(-1, page, *mine.shape[1:]), paged)
