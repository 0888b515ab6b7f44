"""The channel's times, in seconds. They scale with one setting, SGLANG_MIXKV_PATIENCE.

They are short because a cold drafter is cheap and waiting is not: without its KV a drafter loses
4 to 25 % of its accept length, so 500 generated tokens take some 0.1 to 0.8 s longer.
"""

from __future__ import annotations


class Times:
    """`timeouts`: how long a request may wait by SGLang's own timeouts, on both sides together."""

    def __init__(self, patience: float = 1.0, timeouts: float = 600.0) -> None:
        self.patience = patience

        # Decode, after the target's arrival. Draft KV may make no progress for three times what the
        # target took, clamped to these two; `whole_wait` bounds the whole wait of a request.
        self.shortest_wait, self.longest_wait = 0.3 * patience, 1.0 * patience
        self.whole_wait = 5.0 * patience

        # Either side, after SGLang's own transfer: how long its scheduler leaves a request to the
        # channel. Longer than all waits above, or requests would be cold without need.
        self.last_resort = 2 * self.whole_wait

        # Prefill, after the target was sent: how long packing may make no progress.
        self.packing = 1.0 * patience

        # TCP_USER_TIMEOUT of the channel's sockets: the peer's kernel has a message within it, or
        # never gets it.
        self.delivery = 5.0 * patience

        # Decode: how long an announced segment may wait for a slot of its own, how long one read
        # may take, and after how long a stalled thread no longer trusts what it was sent.
        self.unread, self.read, self.stall = 30.0 * patience, 5.0 * patience, 5.0 * patience

        # When a slot without its ACK is reused: later than anything that may still read it, which
        # is delivery + unread + stall + read. The last three are decode's, by the smaller
        # patience of both sides.
        self.slot_aside = 60.0 * patience

        # How long after a slot was published a message may still come from owners that are gone.
        self.unsure = 0.1 * patience

        # How long an OPEN waits for its request.
        self.early_room = timeouts
