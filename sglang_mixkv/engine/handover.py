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
    if hidden is not None:
        queue.draft_token_to_kv_pool = None
    try:
        return original(queue)
    finally:
        queue.draft_token_to_kv_pool = pool
        del _thread.handed


def around_extend(original: Callable[..., Any], queue: Any, decode_reqs: Any) -> Any:
    """Around DecodeTransferQueue.extend."""
    found = original(queue, decode_reqs)
    after_extend(queue, decode_reqs)
    return found


def after_extend(_queue: Any, decode_reqs: Any) -> None:
    """Each room learns its request."""
    for one in decode_reqs:
        handle = getattr(getattr(one, "kv_receiver", None), "handle", None)
        if handle is not None:
            handle.request = getattr(one, "req", None)


def around_resume(original: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Around DecodePreallocQueue.resume_retracted_reqs."""
    resumed = original(queue, *args, **kwargs)
    after_resume(resumed, queue)
    return resumed


def after_resume(resumed: Any, queue: Any) -> None:
    """These requests have new rows."""
    retracted = getattr(queue.kv_manager, "retracted", None)
    if retracted is not None:
        for request in resumed or ():
            retracted(queue.req_to_token_pool, request)


def has_heads(pool: Any) -> bool:
    """Whether its rows are K and V heads (pools of latent rows have one `kv_buffer`), and nothing
    else of it travels as SGLang's state."""
    return hasattr(pool, "k_buffer") and not getattr(pool, "index_k_with_scale_buffer", None)
