"""A rank's GPU: the kernels for copies, the RDMA devices near it, and events of its streams."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    get_ib_devices_for_gpu,
)

from sglang_mixkv.channel.mooncake import forces_tcp
from sglang_mixkv.draft.cuda import UnsafeError
from sglang_mixkv.errors import refuse

logger = logging.getLogger(f"sglang.{__name__}")


def kernels_of(rows: Any, page_size: int, staging: Any, asked: str) -> Any:
    """Return the kernels that copy draft KV on a GPU, or the reason why torch copies instead."""
    from sglang_mixkv.draft.rows_gpu import gpu_rows

    try:
        found = gpu_rows(rows, page_size, staging, asked)
    except UnsafeError as wrong:  # torch must not copy either
        found, asked = str(wrong), "kernels"
    if isinstance(found, str):
        expected, remedy = "the plugin's kernels to copy draft KV", "Fix that, or report it"
        consequence = "torch copies it, an estimated 13 to 30 times slower"
        error = refuse("MIXKV-START-07", expected, found, consequence, remedy)
        if asked == "kernels":
            raise error
        if asked == "auto":
            logger.warning("%s", error)
    return found


def rdma_devices(kv_args: Any) -> str:
    """Return this rank's RDMA devices, joined by commas. --disaggregation-ib-device may list them
    per GPU, as JSON or in a file; without RDMA it is ignored (MooncakeTransferEngine.__init__)."""
    if forces_tcp():
        return ""
    return get_ib_devices_for_gpu(kv_args.ib_device, gpu_of(kv_args)) or ""


def gpu_of(kv_args: Any) -> int:
    return int(kv_args.gpu_id or 0)


def forward_event(scheduler: Any) -> Any:
    """Return an event after all work queued on SGLang's forward stream; None without a GPU."""
    stream = getattr(scheduler, "forward_stream", None)
    if not isinstance(stream, torch.cuda.Stream):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
