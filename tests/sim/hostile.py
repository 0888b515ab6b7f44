"""A prefill rank that violates the protocol. Only its messages are false: no reader can tell
whether the bytes are right that a proper message names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sglang_mixkv.channel.messages import NO_SLOT, Fail, Ready

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.prefill import PrefillRank

CODES = ("aborted", "restarted", "full", "closed", "zzz", "_")
LIES = ("segment", "tokens", "count", "slot", "empty", "behind", "fail", "doubled", "stranger")


def distorted(rank: PrefillRank, reader: DecodeRank, ready: Ready, lie: str) -> list[Ready | Fail]:
    """What is sent in the place of this READY. A lie about its own room, which that room's reader
    can see, is noted as a violation."""
    rng, slots, number = rank.rng, rank.place.server.slots, rank.rng.randint(1, 40)
    wrong: Ready | Fail
    match lie:
        case "segment":
            wrong = replace(ready, segment=ready.segment + number)
        case "tokens":
            wrong = replace(ready, first_token=ready.first_token + number)
        case "count":
            wrong = replace(ready, count=ready.count + 64 + number)
        case "slot":
            wrong = replace(ready, slot=rng.choice((NO_SLOT, slots, slots + number)))
        case "empty":
            wrong = replace(ready, count=0, slot=max(0, ready.slot))
        case "behind" if ready.last:
            wrong = replace(ready, segment=ready.segment + 1, first_token=ready.first_token + 1)
        case "fail":
            wrong = Fail(ready.room, ready.generation, rng.choice(CODES), "no reason")
        case "doubled":
            again = replace(ready, stamp=rank.world.next_stamp(), slot=0)
            rank.world.checks.lie(rank, again, False)
            return [ready, again]
        case _:
            of = rng.choice([*reader.receivers, number])
            other = replace(ready, generation=of, stamp=rank.world.next_stamp())
            rank.world.checks.lie(rank, other, False)
            return [ready, other]
    if wrong == ready:  # a last segment without tokens has no slot
        return [ready]
    rank.world.checks.lie(rank, wrong, True)
    return [ready, wrong] if lie == "behind" else [wrong, ready] if lie == "fail" else [wrong]
