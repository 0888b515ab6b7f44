"""Tables of KV cache slots: copies between ``req_to_token`` rows and flat lists of slots.

``req_to_token``: [requests, pool_len] int32, the cache slot of each position of a request.
Request b of a batch is row ``req_pool_indices[b]``. Signatures as in sgl_kernel's
``speculative.py`` and ``kvcacheio.py``; arguments that a tensor's shape already implies
are accepted and ignored.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def _cells(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of positions [start[b], end[b]), request by request."""
    lengths = (end - start).long()
    rows = req_pool_indices.long().repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    columns = torch.arange(len(rows)) - first + start.long().repeat_interleave(lengths)
    return rows, columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the slots ``out_cache_loc`` into each request's positions [start, end)."""
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the slots of each request's positions [start, end) into ``out_cache_loc``."""
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: len(rows)] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Read the ``topk * steps`` slots after each request's committed tokens."""
    end = seq_lens + topk * speculative_num_steps
    flat = out_cache_loc.view(-1)
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, end, flat, pool_len)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy slots within every KV buffer. All slots of a buffer are read before one is written.

    ``data_ptrs``: [buffers], addresses; ``strides``: [buffers], bytes of one slot.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + slot * size, size) for slot in sources]
        for slot, content in zip(targets, slots, strict=True):
            ctypes.memmove(base + slot * size, content, size)
