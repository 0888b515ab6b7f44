"""The channel's times, in seconds. They scale with one setting, SGLANG_MIXKV_PATIENCE.

They are short because a cold drafter is cheap and waiting is not: without its KV a drafter loses
4 to 25 % of its accept length, so 500 generated tokens take some 0.1 to 0.8 s longer.
"""

from __future__ import annotations

import msgspec


class Times(msgspec.Struct, frozen=True):
    """`timeouts`: how long a request may wait by SGLang's own, on both sides together."""

    patience: float = 1.0
    timeouts: float = 600.0

    @property
    def shortest_wait(self) -> float:
        """Decode, after the target's arrival: how long draft KV may make no progress, at least."""
        return 0.3 * self.patience

    @property
    def longest_wait(self) -> float:
        """The same, at most; between the two it is three times what the target took."""
        return 1.0 * self.patience

    @property
    def whole_wait(self) -> float:
        """Decode, after the target's arrival: how long a request waits for draft KV at all."""
        return 5.0 * self.patience

    @property
    def packing(self) -> float:
        """Prefill, after the target was sent: how long packing may make no progress."""
        return 1.0 * self.patience

    @property
    def late_ack(self) -> float:
        """A slot without its ACK for so long slows its reader down: one other slot at a time."""
        return 1.0 * self.patience

    @property
    def read(self) -> float:
        """How long one read may take, by the reader's clock."""
        return 5.0 * self.patience

    @property
    def stall(self) -> float:
        """A thread that did not run for so long no longer trusts what it was sent before."""
        return 5.0 * self.patience

    @property
    def delivery(self) -> float:
        """TCP_USER_TIMEOUT of the channel's sockets: the peer's kernel has a message within it or
        never gets it."""
        return 5.0 * self.patience

    @property
    def unread(self) -> float:
        """How long an announced segment may wait for a slot of the reader's own."""
        return 30.0 * self.patience

    @property
    def slot_aside(self) -> float:
        """When a slot without its ACK is used again: later than anything that may still read it,
        which is delivery + unread + stall + read. The last three are decode's, by the smaller
        patience of both sides."""
        return 60.0 * self.patience

    @property
    def early_room(self) -> float:
        """How long an OPEN waits for its request."""
        return self.timeouts
