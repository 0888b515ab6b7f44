"""Check the invariants of a state machine and its slots, and that an idle rank holds nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sglang_mixkv.channel.slots import SlotPool, quota_of
from sglang_mixkv.decode.machine import Machine as Decode
from sglang_mixkv.decode.segments import Segment
from sglang_mixkv.prefill.transfer import MAX_IN_FLIGHT


def violations(machine: Any) -> list[str]:
    of_side = _decode if isinstance(machine, Decode) else _prefill
    return [*slot_violations(machine.slots), *of_side(machine)]


def slot_violations(pool: SlotPool) -> Iterator[str]:
    """Yield violations: each slot must be either free or held, and counted once."""
    held, free = set(pool._owner), set(pool.free_slots)
    if len(pool.free_slots) != len(free) or held & free or held | free != set(range(pool.count)):
        yield f"slots: {len(pool.free_slots)} free and {len(held)} held of {pool.count}"
    if dict(pool.held) != Counter(
        pool._owner.values()
    ):  # comparing two Counters would ignore zeros
        yield "slots: the owners' counts are wrong"
    if max(pool.held.values(), default=0) > quota_of(pool.count):
        yield f"slots: one owner has {max(pool.held.values())} of {pool.count}"
    if not set(pool._published) <= held:
        yield "slots: a published slot has no owner"


def outstanding(machine: Any) -> dict[str, int]:
    """Count the objects that requests still hold, by kind. An idle rank holds none."""
    found = {"rooms": len(machine._requests)}
    if isinstance(machine, Decode):
        segments = machine._segments
        waiting = sum(map(len, segments._turns.owners.values()))
        found |= {"reads": waiting + len(segments._reads), "jobs": len(segments.copying)}
    else:
        found |= {
            "waiting": len(machine._early), "jobs": machine._packing._begun,
            "published": len(machine.slots._published), "transfers": len(machine._transfers),
        }  # fmt: skip
    return {name: count for name, count in found.items() if count}


def left(worker: Any) -> list[str]:
    """Return errors and leaks of an idle rank's channel. A dead reader's slots may stay
    published."""
    found = ["a thread of the draft channel has ended"] if worker.broken else []
    held = outstanding(worker._machine).items()
    return found + [f"{count} {name} left" for name, count in held if name != "published"]


def left_by(manager: Any) -> list[str]:
    """Return errors and leaks of a manager's channels. A stock manager has none."""
    channels = (getattr(manager, f"{side}_channel", None) for side in ("prefill", "decode"))
    return [line for channel in channels if channel is not None for line in left(channel)]


def _prefill(machine: Any) -> Iterator[str]:
    transfers = machine._transfers.values()
    packed = sum(one.packed for transfer in transfers for one in transfer.packing)
    yield from _used(
        machine.slots, machine._packing._begun + packed + len(machine.slots._published)
    )
    if machine._packing._begun > MAX_IN_FLIGHT:
        yield f"{machine._packing._begun} segments are packed at once"
    requests = [*machine._requests.values(), *machine._early.values()]
    found = {id(one) for request in requests for one in request.transfers.values()}
    if found != set(map(id, transfers)):
        yield f"{len(transfers)} transfers, {[len(one.transfers) for one in requests]} of requests"
    if dict(machine._open) != Counter(transfer.connection for transfer in transfers):
        yield "the connections' counts are wrong"


def _decode(machine: Any) -> Iterator[str]:
    segments = machine._segments
    copying = sum(isinstance(one, Segment) for one in segments.copying)
    reading = sum(len(read.segments) for read in segments._reads)
    yield from _used(machine.slots, reading + copying)
    probes = set[int]().union(*(state.probes for state in machine.breaker._states.values()))
    if not probes <= machine._requests.keys():
        yield "breaker: a probe's request has ended, but the probe has not"


def strikes(machine: Decode) -> dict[bytes, int]:
    """Return the number of strikes of each peer that has any."""
    return {peer: state.strikes for peer, state in machine.breaker._states.items()}


def _used(slots: SlotPool, used: int) -> Iterator[str]:
    if len(slots.free_slots) + used != slots.count:
        yield f"slots: {len(slots.free_slots)} free, {used} in use of {slots.count}"
