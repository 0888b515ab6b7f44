"""What tests/gpu builds of SGLang's own classes: pools, pages, and FlashInfer's kernels."""

from __future__ import annotations

import inspect

import pytest
import torch
from gpu import pools, test_flashinfer


@pytest.mark.parametrize("page", [1, 16, 64])
def test_pools_and_pages_are_sglangs(page: int) -> None:
    """K and V of a layer are halves of one allocation, and a backend's pages a view of its rows."""
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


def test_flashinfer_is_called_as_sglang_calls_it() -> None:
    """With the kernels for tensor cores, of fa2; the installed FlashInfer takes these arguments."""
    decode = pytest.importorskip("flashinfer.decode")
    from sglang.srt.layers.attention import flashinfer_backend as backend

    for dtype in pools.DTYPES.values():
        assert backend.should_use_tensor_core(dtype, test_flashinfer.GROUP, 1)
    assert 'self.decode_backend = "fa2"' in inspect.getsource(backend)
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper
    assert {"use_tensor_cores", "backend"} <= inspect.signature(wrapper).parameters.keys()
