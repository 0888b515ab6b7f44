"""Clears the draft rows of a retracted request that decode resumes from its backup.

fault   A `cpu_tensor` backup has only the target's rows (Req.load_kv_cache in
        managers/schedule_batch.py), so the drafter would read other requests' rows
patch   none yet
until   that backup has the draft rows, too. Keep pool_hooks.around_resume: it also counts requests
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_disagg


def clear_retracted(pool: Any, table: Any, request: Any) -> None:
    """Zero the draft rows of tokens whose target rows Req.load_kv_cache restores, unless the backup
    is SGLang's host pool, which has both. This runs on the current stream, which
    resume_retracted_reqs has made wait for the forward that may have written the rows."""
    if get_disagg().disaggregation_decode_retraction_backup != "cpu_tensor":
        return
    rows = table.req_to_token[request.kv.req_pool_idx, : request.seqlen - 1].long()
    with torch.inference_mode():
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[rows] = 0
