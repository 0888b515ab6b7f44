"""The channel's times, in seconds. They scale with one setting, SGLANG_MIXKV_PATIENCE.

They are short because a cold drafter costs less than waiting: without its KV a drafter loses
4 to 25 % of its accept length, so 500 generated tokens take some 0.1 to 0.8 s longer.
"""

from __future__ import annotations


class Times:
    """`timeouts`: how long SGLang's own timeouts let a request wait, on both sides together."""

    def __init__(self, patience: float = 1.0, timeouts: float = 600.0) -> None:
        self.patience = patience

        # Decode, after the target's arrival. Draft KV may stall for three times as long as the
        # target's transfer took, clamped to these two. `whole_wait` bounds a request's whole wait.
        self.shortest_wait, self.longest_wait = 0.3 * patience, 1.0 * patience
        self.whole_wait = 5.0 * patience

        # Either side, after SGLang's own transfer: how long its scheduler leaves a request to the
        # channel. A shorter time than the waits above would make requests cold needlessly.
        self.last_resort = 2 * self.whole_wait

        # Prefill, after the target was sent: how long packing may stall.
        self.packing = 1.0 * patience

        # TCP_USER_TIMEOUT of the channel's sockets: the peer's kernel gets a message within this
        # time, or never.
        self.delivery = 5.0 * patience

        # Decode: how long an announced segment may wait for a local slot, how long a read may take,
        # and how long a thread may stall before it rejects the messages that arrived meanwhile.
        self.unread, self.read, self.stall = 30.0 * patience, 5.0 * patience, 5.0 * patience

        # When a slot without its ACK is reused: once nothing can read it any more, which is after
        # delivery + unread + stall + read. The last three are decode's, at the smaller patience of
        # the two sides.
        self.slot_aside = 60.0 * patience

        # How long a message from a dead owner may still arrive after a slot was published.
        self.unsure = 0.1 * patience

        # How long an OPEN waits for its request.
        self.early_room = timeouts
