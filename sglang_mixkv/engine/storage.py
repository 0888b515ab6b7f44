"""HiCache's storage tier with a drafter, which needs Mooncake's store (STORAGE in refusals.py).

The name of a page's object contains its tokens' hash and, if ranks hold different heads, the rank
(`mha_suffix` in SGLang's mooncake_store.py), but not the number of ranks. Servers of different
attention-TP sizes that share a store would read the wrong heads, or part of a page, which Mooncake
reports as success. With the size in that suffix, they miss each other's draft objects
(docs/deploy.md, "Storage"). A missing object ends the hit (PoolHitPolicy.ALL_PAGES).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput
from sglang.srt.runtime_context import get_server_args

from sglang_mixkv.refusals import STORAGE, STORED, has_drafter

logger = logging.getLogger(f"sglang.{__name__}")


def around_register(original: Callable[..., None], tier: Any, pool: Any) -> None:
    """Wrap MooncakeStore.register_mem_pool_host, which SGLang calls once for each store, at start
    or when storage is attached later, before the store has objects. If SGLang's `tp_lcm_size` is
    set, the suffix lists this rank's parts of it, and differs between sizes."""
    original(tier, pool)
    if isinstance(tier.mha_suffix, str) and has_drafter(get_server_args()):
        tier.mha_suffix = f"tp{tier.storage_config.tp_size}_{tier.mha_suffix}"


def around_attach(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Wrap Scheduler.attach_hicache_storage_wrapped, so that `PUT /hicache/storage-backend` obeys
    the same rule as the flag does at start."""
    if request.hicache_storage_backend == STORED or not has_drafter(get_server_args()):
        return original(scheduler, request)
    reason = f"[MIXKV-START-03] {STORAGE}"
    logger.warning("%s; sglang-mixkv attaches no storage tier", reason)
    return AttachHiCacheStorageReqOutput(success=False, message=reason)
