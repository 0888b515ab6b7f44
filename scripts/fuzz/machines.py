"""What the targets of both state machines share.

An input is a row of steps (mutate.py): messages of a hostile peer, and what else happens on a
rank. Beside the hostile peer is a victim, which follows the protocol. What nobody can guess of it
(instance, room number, generation, stamps) is drawn from a hash of the input, so that no mutation
finds it.

Findings: an exception; wrong books after any event; work outside what was agreed; a slot that is
freed for somebody else; a victim that is not served; anything left when all requests have ended.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from mutate import Steps, unpack
from parsers import DRAFT, SLOT_BYTES, SLOTS

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times

HOSTILE, STRANGER, VICTIM = b"reader_0", b"reader_1", b"victim__"
TOKENS, MAX_STEPS = 40, 48  # of each prompt, of an input


class Short(Times, frozen=True):
    """What a rank waits longest for comes within one input."""

    early_room = property(lambda self: 6.0)
    slot_aside = property(lambda self: 6.0)


def segment_tokens(heads: int, slot_bytes: int = SLOT_BYTES) -> int:
    return DRAFT.tokens_in(min(slot_bytes, SLOT_BYTES), heads)


class Rank:
    """A machine, and the executor of its actions. `kinds`: of messages that its channel thread
    passes on."""

    rooms: Any
    do: Any
    tick: Any
    kinds: tuple[type, ...]

    def __init__(self, data: bytes) -> None:
        secret = hashlib.sha256(data).digest()
        self.instance, self.number = secret[:8], int.from_bytes(secret[8:15]) | 1 << 55
        self.stamps = itertools.count(int.from_bytes(secret[16:23]) | 1 << 55)
        self.now, self.times = 0.0, Short()
        self.slots = SlotPool(SLOTS, self.times)

    def feed(self, event: Any) -> list[Any]:
        actions: list[Any] = self.rooms.handle(event, self.now)
        for action in actions:
            self.do(action)
        assert not [*self.rooms.check()], [*self.rooms.check()]
        return actions

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(self.tick)


def run(rank: Any, data: bytes) -> None:
    """`rank`: a Rank, with how it receives, steps and finishes."""
    for what, frame in unpack(data)[:MAX_STEPS]:
        kind, which = what % 8, what // 8
        if kind < 4:
            try:
                message = messages.decode(frame[: messages.MAX_BYTES])
            except ValueError:
                continue
            if isinstance(message, rank.kinds):
                rank.receive(which, message)
        elif kind == 4:
            rank.wait((1 + which % 8) / 2)
        else:
            rank.step(kind, which)
    rank.finish()
    for _ in range(8):
        rank.wait(1.0)
    assert not rank.rooms.left(), f"left: {rank.rooms.left()}"


# -- parts of seeds


def sent(*received: messages.Message, by: int = 0) -> Steps:
    return [(8 * by, messages.encode(message)) for message in received]


def then(*kinds: int, which: int = 0) -> Steps:
    return [(kind + 8 * which, b"") for kind in kinds]
