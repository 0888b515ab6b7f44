"""Clears the drafter's rows of a request that decode resumes from its backup.

fault   A retracted request's backup in `cpu_tensor` has rows of the target alone (Req.load_kv_cache
        in managers/schedule_batch.py): its drafter would read other requests' rows
patch   none yet
until   that backup has the drafter's rows. around_resume (engine/pool_hooks.py) stays: it counts
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_disagg


def clear_retracted(pool: Any, table: Any, request: Any) -> None:
    """Zero the drafter's rows of tokens whose target rows Req.load_kv_cache fills, if SGLang's
    backup has only the target's; its host pool has both. On the current stream, which
    resume_retracted_reqs has made wait for the forward that may have written them."""
    if get_disagg().disaggregation_decode_retraction_backup != "cpu_tensor":
        return
    rows = table.req_to_token[request.kv.req_pool_idx, : request.seqlen - 1].long()
    with torch.inference_mode():
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[rows] = 0
