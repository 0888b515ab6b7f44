"""What scripts/gpu.sh builds of SGLang's own classes: pools, pages, and FlashInfer's kernels."""

from __future__ import annotations

import inspect

import pytest
from rig.gpu import load

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("page", [1, 16, 64])
def test_pools_and_pages_are_sglangs(page: int) -> None:
    """K and V of a layer are halves of one allocation, and a backend's pages a view of its rows."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    layout = pytest.importorskip("sglang.srt.mem_cache.layout.paged_view")
    scene, part = load("scene"), load("part_flashinfer")
    pool = MHATokenToKVPool(
        size=4 * page, page_size=page, dtype=torch.bfloat16, head_num=8, head_dim=scene.HEAD,
        layer_num=2, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    theirs = [*pool.k_buffer, *pool.v_buffer]
    made = scene.pool(2, 8, len(theirs[0]), "bf16", "cpu", 1)
    for entry, mine in zip(theirs, made, strict=True):
        assert (entry.shape, entry.stride()) == (mine.shape, mine.stride())
        assert entry.storage_offset() == mine.storage_offset()
        entry.copy_(mine)
        assert torch.equal(
            part.as_pages(mine, page), layout.paged_kv_view(entry, page, 8, scene.HEAD)
        )


def test_flashinfer_is_called_as_sglang_calls_it() -> None:
    """With the kernels for tensor cores, of fa2; the installed FlashInfer takes these arguments."""
    decode = pytest.importorskip("flashinfer.decode")
    from sglang.srt.layers.attention import flashinfer_backend as backend

    scene, part = load("scene"), load("part_flashinfer")
    for dtype in scene.DTYPES.values():
        assert backend.should_use_tensor_core(dtype, part.GROUP, 1)
    assert 'self.decode_backend = "fa2"' in inspect.getsource(backend)
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper
    assert {"use_tensor_cores", "backend"} <= inspect.signature(wrapper).parameters.keys()
