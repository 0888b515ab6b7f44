"""Copies between KV pools and the host cache, both in host memory on the CPU engine.

A KV pool has a buffer per layer (and per K and V): [slots, ...]. The host cache has the same
buffers (`layer_first`), or [pages, layers, page_size, ...] (`page_first_direct`). Indices are
slots, page by page. The signatures are those of sgl_kernel's ``kvcacheio.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def transfer_kv_direct(
    src_layers: list[Tensor],
    dst_layers: list[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy slots of each source buffer to slots of its destination."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        _bytes(destination)[dst_indices] = _bytes(source)[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[Tensor],
    dst_ptrs: list[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of the host's pages to slots of the pool."""
    pages = _pages(src_indices, page_size)
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        _bytes(destination)[dst_indices] = _bytes(source)[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[Tensor],
    dst_ptrs: list[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy slots of all layers to host pages. Sources: K of every layer, then V if there is one."""
    pages, layers = _pages(dst_indices, page_size), len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        group, layer = divmod(number, layers)
        rows = _bytes(source)[src_indices]
        _bytes(dst_ptrs[group])[pages, layer] = rows.view(len(pages), page_size, *rows.shape[1:])


def _pages(indices: Tensor, page_size: int) -> Tensor:
    return indices[::page_size] // page_size


def _bytes(buffer: Tensor) -> Tensor:
    """View as bytes, since PyTorch cannot index fp8."""
    return buffer.view(torch.uint8)


COPIES = (
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
)
"""The functions that a host pool calls with `--hicache-io-backend direct`."""
