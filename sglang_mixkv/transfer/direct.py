"""The direct path: byte ranges as they are, over TCP in batches that Mooncake's transport takes.

About 2,048 descriptors in flight per engine and peer is where that transport starts to fail; at
most half of that are used. What all threads have in flight together: bounded.py.
"""

from __future__ import annotations

from typing import Protocol

from sglang_mixkv.core.plan import Blocks

IN_FLIGHT = 1024
STARTED = 128  # of them, in writes that go on by themselves
MAX_DESCRIPTORS = IN_FLIGHT - STARTED


class Engine(Protocol):
    """The one call that moves bytes: SGLang's MooncakeTransferEngine has it."""

    def batch_transfer_sync(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int: ...  # fmt: skip


def write(engine: Engine, session: str, blocks: Blocks, most: int = 0) -> int:
    """Write all ranges to `session`, in order, at most `most` in one call (0: all). Returns 0, or
    the first non-zero code.

    After a non-zero code earlier batches have been written, and later bytes of the failed
    one may still arrive: the destination must be held until they cannot.
    """
    total = len(blocks.length)
    if total <= (most or total):
        return engine.batch_transfer_sync(session, *blocks.lists()) if total else 0
    first = int(blocks.length[0])
    alike = bool((blocks.length == first).all())
    for start in range(0, total, most):
        batch = slice(start, start + most)
        src = blocks.src[batch].tolist()
        lengths = [first] * len(src) if alike else blocks.length[batch].tolist()
        code = engine.batch_transfer_sync(session, src, blocks.dst[batch].tolist(), lengths)
        if code != 0:
            return code
    return 0
