"""SGLang's deferred release of failed requests' resources, without the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Releases:
    """The resources of a decode rank's failed requests, retained until no write to them can be in
    flight.

    SGLang's own code decides when to release them: DecodeTransferQueue._defer_release and
    resolve_deferred_releases (disaggregation/decode.py)."""

    def __init__(self) -> None:
        from sglang.srt.disaggregation import decode
        from sglang.srt.environ import envs

        decode.all_reduce_flags = lambda flags, **_: flags  # there are no other ranks
        queue = decode.DecodeTransferQueue.__new__(decode.DecodeTransferQueue)
        queue._deferred_releases = []
        queue.deferred_kv_release_timeout = (
            envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()
        )
        queue.enable_staging, queue.gloo_group = False, None
        queue.enable_host_receive = False  # 0.5.22 reads this, newer releases the next one
        queue._is_host_destination = lambda _: False
        queue._release_request = lambda request: request.free()
        queue._observe_deferred_kv_release = lambda *_, **__: None
        queue.metadata_buffers = SimpleNamespace(clear_slot=lambda _: None, bootstrap_room=[0])
        queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda _: None)
        self.queue = queue

    def __len__(self) -> int:
        return len(self.queue._deferred_releases)

    def hold(self, receiver: Any, free: Callable[[], None] = lambda: None) -> None:
        """Retain a failed request's pages, as pop_transferred does. `free` is called when they may
        be reused."""
        if not receiver.abort_notified:
            receiver.ensure_abort_notified(force_arm=True)
        req = SimpleNamespace(bootstrap_room=receiver.bootstrap_room)
        self.queue._defer_release(
            SimpleNamespace(req=req, kv_receiver=receiver, metadata_buffer_index=0, free=free)
        )

    def resolve(self) -> None:
        """Release the resources of drained and overdue requests."""
        self.queue.resolve_deferred_releases()

    def wait(self, seconds: float | None = None) -> None:
        """Resolve releases for `seconds`, or until all are released if `seconds` is None."""
        end = time.monotonic() + (seconds or 0)
        while time.monotonic() < end or (seconds is None and len(self)):
            self.resolve()
            time.sleep(0.005)
