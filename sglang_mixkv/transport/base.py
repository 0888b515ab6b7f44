"""The direct path: byte ranges as they are, in batches that Mooncake's TCP transport takes.

About 2,048 descriptors in flight an engine and peer is where the transport starts to fail; at
most half of that are used. What all threads have in flight together: bounded.py.
"""

from __future__ import annotations

from typing import Protocol

from sglang_mixkv.kv.ranges import Blocks

IN_FLIGHT = 1024
STARTED = 128  # of them, in writes that go on by themselves
MAX_DESCRIPTORS = IN_FLIGHT - STARTED


class Engine(Protocol):
    """The one call that moves bytes: SGLang's MooncakeTransferEngine has it."""

    def batch_transfer_sync(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int: ...  # fmt: skip


def write(engine: Engine, session: str, blocks: Blocks) -> int:
    """Write all ranges to `session`, in order. Returns 0, or the first non-zero code.

    After a non-zero code earlier batches have been written, and later bytes of the failed
    one may still arrive: the destination must be held until they cannot.
    """
    total = len(blocks.length)
    if total <= MAX_DESCRIPTORS:
        return engine.batch_transfer_sync(session, *blocks.lists()) if total else 0
    first = int(blocks.length[0])
    alike = bool((blocks.length == first).all())
    for start in range(0, total, MAX_DESCRIPTORS):
        batch = slice(start, start + MAX_DESCRIPTORS)
        src = blocks.src[batch].tolist()
        lengths = [first] * len(src) if alike else blocks.length[batch].tolist()
        code = engine.batch_transfer_sync(session, src, blocks.dst[batch].tolist(), lengths)
        if code != 0:
            return code
    return 0


DIRECT_DESCRIPTORS = 16


DIRECT_MEAN = 96 << 10


def prefer_packed(descriptors: int, total_bytes: int, mode: str) -> bool:
    """Whether to avoid sending so many bytes as so many ranges."""
    if mode != "auto":
        return mode == "packed"
    return descriptors > DIRECT_DESCRIPTORS and total_bytes < descriptors * DIRECT_MEAN
