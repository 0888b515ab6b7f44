"""How bytes get to a peer: what every transport offers, and what its ranges cost.

Lifetime of a write:

    write(session, blocks)  -> Handle     in flight, or already over
    wait(handle)            -> 0, or the code of a failure

With 0 the bytes are at the peer and the source may change. After any other code bytes may still
arrive: the destination must be held until they cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sglang_mixkv.kv.ranges import Blocks


@dataclass(frozen=True)
class Limits:
    """What ranges cost on a transport.

    A copy pays where otherwise more than `few` ranges average less than `short` bytes.
    `overlaps`: a write goes on while this thread does something else. `begun`: ranges of one
    chunk that may be in flight so.
    """

    few: int
    short: int
    overlaps: bool = False
    begun: int = 0

    def worth_packing(self, ranges: int, size: int, mode: str) -> bool:
        """Whether to copy `size` bytes rather than to send them as so many ranges."""
        if mode != "auto":
            return mode == "packed"
        return ranges > self.few and size < ranges * self.short


class Transport(Protocol):
    """One process's way to its peers. All calls may come from several threads."""

    @property
    def limits(self) -> Limits: ...

    def register(self, address: int, size: int) -> None:
        """Let this memory be a source or a destination. MemoryError where that fails."""

    def write(self, session: str, blocks: Blocks, *, overlap: bool = False) -> Any:
        """Begin to write these ranges: a handle for `wait`. With `overlap` the caller has
        something else to do meanwhile. Ranges whose sources or destinations are wrong show in
        `wait`."""

    def wait(self, handle: Any) -> int:
        """The end of a write, once for each handle: 0, or a code that is not."""

    def why(self, code: int) -> str:
        """What a code of `wait` that is not 0 stands for."""

    def probe(self, session: str) -> bool:
        """Whether the peer answers."""
