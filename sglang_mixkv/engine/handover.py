"""The drafter's pool, hidden from SGLang's KV args and handed to the manager.

SGLang builds everything that names KV entries (pointers, layer ids, kinds of memory, staging
slots, checksums) in `_init_kv_manager` of both queues (disaggregation/prefill.py, decode.py). While
that runs, the queue has no draft pool: all of it is the target's, and consistent. Only pools of
KV heads are hidden; an MLA drafter's rows are the same on every rank, and SGLang moves them right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Handed(NamedTuple):
    """What the queue hands over. `pool`: the drafter's, unwrapped, None where it is not hidden."""

    pool: Any
    scheduler: Any


_thread = threading.local()


def take() -> Handed:
    """What was handed to the manager that is being built in this thread."""
    return getattr(_thread, "handed", Handed(None, None))


def around_init(original: Callable[[Any], Any], queue: Any) -> Any:
    """Around `_init_kv_manager` of both queues."""
    pool = queue.draft_token_to_kv_pool
    whole = getattr(pool, "full_kv_pool", pool)
    hidden = whole if has_heads(whole) else None
    _thread.handed = Handed(hidden, getattr(queue, "scheduler", None))
    try:
        if hidden is None:
            return original(queue)
        queue.draft_token_to_kv_pool = None
        try:
            return original(queue)
        finally:
            queue.draft_token_to_kv_pool = pool
    finally:
        del _thread.handed


def after_extend(_queue: Any, decode_reqs: Any) -> None:
    """After DecodeTransferQueue.extend: each room learns its request."""
    for one in decode_reqs:
        handle = getattr(getattr(one, "kv_receiver", None), "handle", None)
        if handle is not None:
            handle.request = getattr(one, "req", None)


def after_resume(resumed: Any, queue: Any) -> None:
    """After DecodePreallocQueue.resume_retracted_reqs: these requests have new rows."""
    retracted = getattr(queue.kv_manager, "retracted", None)
    if retracted is not None:
        for request in resumed or ():
            retracted(queue.req_to_token_pool, request)


def has_heads(pool: Any) -> bool:
    """Whether its rows are K and V heads, and nothing else of it travels as SGLang's state."""
    if pool is None:
        return False
    from sglang.srt.disaggregation.utils import is_mla_backend

    index_keys = getattr(pool, "index_k_with_scale_buffer", None)
    return not is_mla_backend(pool) and hasattr(pool, "k_buffer") and not index_keys
