"""NIXL: ranges of any number in one write, over an agent that SGLang made.

A write is posted, and then asynchronous. It is over when NIXL says so: `check_xfer_state` returns
DONE or ERR, or raises once the connection to the peer is lost. A handle that is released while it
runs does not stop its write, so one that is given up here ends with a code as well: bytes of it
may still arrive.

NIXL knows no limit of ranges in flight. Memory that was not registered shows before a byte is
sent, at the source and at the peer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from sglang_mixkv.kv.ranges import Blocks
from sglang_mixkv.transport.base import Limits

logger = logging.getLogger(__name__)

# A range costs 1.5 us over shared memory and some 6 us over TCP, as much as the copy of so many
# bytes at both ends.
FEW, SHORT = 16, 16 << 10

GIVE_UP_S = 60.0  # a peer that is stopped shows in no other way
BUSY_POLLS, POLL_S = 200, 5e-5


class Code(IntEnum):
    """How a write ended."""

    DONE = 0
    REJECTED = -1
    FAILED = -2
    LOST = -3
    LATE = -4


WHY = {
    Code.REJECTED: "NIXL did not take the write",
    Code.FAILED: "NIXL reports an error",
    Code.LOST: "the connection to it is lost",
    Code.LATE: f"it took more than {GIVE_UP_S:.0f} s",
}


@dataclass(frozen=True)
class Memory:
    """What NIXL calls a kind of memory, and the device of it on this rank."""

    kind: str
    device: int


@dataclass(frozen=True)
class Ended:
    """A write that was over when it was posted."""

    code: Code


@dataclass(frozen=True)
class Begun:
    """A write in flight, and when it is given up (time.monotonic)."""

    handle: Any
    session: str
    until: float


class Nixl:
    """Transport over one NIXL agent, for one kind of memory.

    `device_of`: the peer's device, by session. `lost`: peers to which the connection broke, or
    that did not take a write in time; nothing is written to them. NIXL still says that it has
    their metadata. Who takes such a peer anew removes it from the agent first.
    """

    limits = Limits(FEW, SHORT)  # packing while a write goes on gains nothing: UCX copies too

    def __init__(
        self, agent: Any, memory: Memory, device_of: Callable[[str], int],
        lost: set[str] | None = None,
    ) -> None:  # fmt: skip
        self._agent, self._memory, self._device_of = agent, memory, device_of
        self.lost = set() if lost is None else lost

    def register(self, address: int, size: int) -> None:
        try:
            region = [(address, size, self._memory.device, "")]
            self._agent.register_memory(region, self._memory.kind)
        except Exception as error:
            raise MemoryError(f"registering {size} bytes raised {error!r}") from error

    def why(self, code: int) -> str:
        return WHY[Code(code)]

    def probe(self, session: str) -> bool:
        return bool(self._agent.check_remote_metadata(session)) and session not in self.lost

    def write(self, session: str, blocks: Blocks, *, overlap: bool = False) -> Ended | Begun:
        if not len(blocks.length):
            return Ended(Code.DONE)
        if session in self.lost:
            return Ended(Code.LOST)
        try:
            local = self._ranges(blocks.src, blocks.length, self._memory.device)
            remote = self._ranges(blocks.dst, blocks.length, self._device_of(session))
            handle = self._agent.initialize_xfer("WRITE", local, remote, session)
            state = self._agent.transfer(handle)
        except Exception as error:
            return Ended(self._failed(session, error, Code.REJECTED))
        if state == "PROC":
            return Begun(handle, session, time.monotonic() + GIVE_UP_S)
        return Ended(Code.DONE if state == "DONE" else Code.FAILED)

    def wait(self, handle: Ended | Begun) -> int:
        return handle.code if isinstance(handle, Ended) else self._finish(handle)

    def _finish(self, begun: Begun) -> Code:
        polls = 0
        try:
            while (state := self._agent.check_xfer_state(begun.handle)) == "PROC":
                if time.monotonic() > begun.until:
                    self.lost.add(begun.session)
                    return Code.LATE
                polls += 1
                time.sleep(0 if polls < BUSY_POLLS else POLL_S)
        except Exception as error:
            return self._failed(begun.session, error, Code.FAILED)
        return Code.DONE if state == "DONE" else Code.FAILED

    def _failed(self, session: str, error: Exception, otherwise: Code) -> Code:
        logger.warning("[MIXKV-SEND-03] sglang-mixkv: a write to %s failed: %r", session, error)
        return Code.LOST if self.loses(session, error) else otherwise

    def loses(self, session: str, error: BaseException | None) -> bool:
        """Whether this error says that the connection broke; the peer is lost then."""
        broke = "Disconnect" in type(error).__name__
        if broke:
            self.lost.add(session)
        return broke

    def has_lost(self, session: str, handle: Any) -> bool:
        """Whether a write that another posted to this peer ended with its connection."""
        try:
            self._agent.check_xfer_state(handle)
        except Exception as error:
            return self.loses(session, error)
        return False

    def _ranges(self, addresses: Any, lengths: Any, device: int) -> Any:
        """NIXL's descriptors: address, length and device of each range."""
        rows = np.empty((len(lengths), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, device
        return self._agent.get_xfer_descs(rows, self._memory.kind)
