"""Hooks around methods of SGLang's queues (HOOKS in seams.py). They hide the drafter's pool from
SGLang's KV args, pass it to the manager, and record which requests start or resume.

SGLang builds all lists of KV entries (pointers, layer ids, kinds of memory, staging slots,
checksums) in `_init_kv_manager` of both queues (disaggregation/prefill.py, decode.py). While that
runs, the queue has no draft pool, so all lists contain only the target's entries. Only pools of KV
heads, which have a `k_buffer`, are hidden. An MLA drafter's rows (`kv_buffer`) are the same on
every rank: SGLang moves them correctly, as well as the index keys that only such pools have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_mixkv.engine import draft_pool
from sglang_mixkv.guards import retraction

logger = logging.getLogger(f"sglang.{__name__}")


class DraftPoolContext(NamedTuple):
    """A queue's data for the manager that it builds. `pool`: the drafter's, unwrapped, if
    hidden."""

    pool: Any
    scheduler: Any


_NONE = DraftPoolContext(None, None)
_context = ContextVar("_context", default=_NONE)  # of the manager that this thread is building
current = _context.get


def around_init(original: Callable[[Any], Any], queue: Any) -> Any:
    """Wrap `_init_kv_manager` of both queues."""
    pool = queue.draft_token_to_kv_pool
    whole = getattr(pool, "full_kv_pool", pool)
    hidden = whole if hasattr(whole, "k_buffer") else None
    if hidden is not None and isinstance(pool, SWAKVPool):  # full_kv_pool lacks some layers
        name = type(pool).__name__
        raise draft_pool.not_whole(f"{name}: its sliding-window layers have pages of their own")
    token = _context.set(DraftPoolContext(hidden, queue.scheduler))
    if hidden is not None:
        queue.draft_token_to_kv_pool = None
    try:
        return draft_pool.checked(original(queue), hidden)
    finally:
        queue.draft_token_to_kv_pool = pool
        _context.reset(token)


def around_extend(original: Callable[..., Any], queue: Any, decode_reqs: Any) -> Any:
    """Wrap DecodeTransferQueue.extend, to record the request of each handle."""
    found = original(queue, decode_reqs)
    for one in decode_reqs:
        handle = getattr(one.kv_receiver, "handle", None)  # None in SGLang's own receivers
        if handle is not None:
            handle.request = one.req
    return found


def around_resume(original: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap DecodePreallocQueue.resume_retracted_reqs, which restores these requests' target rows.
    Draft rows that the backup lacks are cleared, since they hold other requests' KV."""
    resumed = original(queue, *args, **kwargs)
    for request in resumed or ():
        try:
            local = queue.kv_manager.local
            local.reporter.retracted(request)
            if (pool := local.pool_context.pool) is not None:
                retraction.clear_retracted(pool, queue.req_to_token_pool, request)
        except Exception:
            logger.exception("[MIXKV-SELF-01] draft rows of a resumed request are not cleared")
    return resumed
