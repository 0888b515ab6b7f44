"""A prefill rank that does not keep to the protocol. Bytes of its own it can always falsify; these
lies a reader can see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sglang_mixkv.channel.messages import Announced, Fail, Ready

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.prefill import PrefillRank

CODES = ("aborted", "restarted", "full", "closed", "zzz", "_")
LIES = (
    "segment", "tokens", "count", "slot", "empty", "early", "behind", "fail", "doubled", "stranger"
)  # fmt: skip


def distorted(rank: PrefillRank, reader: DecodeRank, ready: Ready, lie: str) -> list[Ready | Fail]:
    """What is sent in the place of this READY. After a lie whose room is this one and wants more,
    that room is cold: it is noted as a violation."""
    rng, slots, number = rank.rng, rank.place.server.slots, rank.rng.randint(1, 40)
    segments, tokens = list(ready.segments), sum(one.count for one in ready.segments)
    at = rng.randrange(len(segments)) if segments else 0
    wrong: Ready | Fail
    match lie:
        case "segment":
            wrong = replace(ready, segment=ready.segment + number)
        case "tokens":
            wrong = replace(ready, first_token=ready.first_token + number)
        case "count" if segments:
            segments[at] = replace(segments[at], count=segments[at].count + 64 + number)
            wrong = replace(ready, segments=tuple(segments))
        case "slot" if segments:
            segments[at] = replace(segments[at], slot=slots + rng.choice((0, number)))
            wrong = replace(ready, segments=tuple(segments))
        case "empty" if not ready.last:
            wrong = replace(ready, segments=())
        case "early" if ready.first_token + tokens <= _last_page(reader, ready):
            wrong = replace(ready, last=True)
        case "behind" if ready.last:
            more = Announced(0, rank.world.next_number(), 1)
            wrong = replace(ready, segment=ready.segment + len(segments), segments=(more,))
        case "fail":
            wrong = Fail(ready.room, ready.generation, rng.choice(CODES), "no reason")
        case "doubled" if segments:
            fresh = [replace(one, stamp=rank.world.next_number(), slot=0) for one in segments]
            again = replace(ready, segments=tuple(fresh))
            rank.world.checks.lie(rank, again, False)
            return [ready, again]
        case "stranger" if segments:
            of = rng.choice([*reader.receivers, number])
            fresh = [replace(one, stamp=rank.world.next_number()) for one in segments]
            other = replace(ready, generation=of, segments=tuple(fresh))
            rank.world.checks.lie(rank, other, False)
            return [ready, other]
        case _:
            return [ready]
    rank.world.checks.lie(rank, wrong, True)
    return [ready, wrong] if lie == "behind" else [wrong, ready] if lie == "fail" else [wrong]


def _last_page(reader: DecodeRank, ready: Ready) -> int:
    """Where the last page of its request begins on decode."""
    receiver = reader.receivers[ready.generation]
    return receiver.end - reader.place.server.page
