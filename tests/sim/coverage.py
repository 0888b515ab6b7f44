"""Which transitions of the machines a run has been through, under which faults.

A transition is an event and the state of what it meets. It counts for each kind of fault that has
begun in its world, and for "none" before the first.
"""

from __future__ import annotations

from collections import Counter

from sglang_mixkv.channel.messages import Ack, Fail, Open
from sglang_mixkv.decode import events as dev
from sglang_mixkv.prefill import events as pev

Transition = tuple[str, str, str]  # side, event, state


class Coverage:
    def __init__(self) -> None:
        self.counts: Counter[tuple[Transition, str]] = Counter()
        self._now: Counter[Transition] = Counter()

    def add(self, machine: object, event: object) -> None:
        kind = type(event)
        find = _STATES.get(kind)
        name = kind.__name__
        if kind in (pev.Received, dev.Received):
            name = type(event.message).__name__
        side = "prefill" if kind in _PREFILL else "decode"
        self._now[side, name, find(machine, event) if find else ""] += 1

    def flush(self, faults: set[str]) -> None:
        for transition, count in self._now.items():
            for fault in faults or ("none",):
                self.counts[transition, fault] += count
        self._now.clear()

    def merge(self, other: Coverage) -> None:
        self.counts.update(other.counts)

    def pairs(self) -> dict[Transition, dict[str, int]]:
        found: dict[Transition, dict[str, int]] = {}
        for (transition, fault), n in self.counts.items():
            found.setdefault(transition, {})[fault] = n
        return found


# -- states on prefill


def _room(room: object) -> str:
    if room is None:
        return "no room"
    if room.settled:
        return "settled"
    sent = "sent, " if room.sent is not None else ""
    if not room.parts:
        return sent + "unopened"
    if room.missing > 0:
        return sent + "partly opened"
    return sent + ("all ended" if room.all_ended else "packing")


def _use(machine: object, event: object) -> str:
    return _room(machine._uses.get(event.use))


def _begin(machine: object, event: pev.Begin) -> str:
    early = "early OPENs" if event.room in machine._early._readers else "no OPENs"
    return early + (", number in use" if event.room in machine._current else "")


def _to_prefill(machine: object, event: pev.Received) -> str:
    message = event.message
    match message:
        case Open():
            if message.generation in machine._parts:
                return "known"
            early = machine._early.get(message.room, message.reader)
            if message.prefill != machine._instance:
                return "another instance"
            return "early, superseding" if early else _room(machine._current.get(message.room))
        case Ack():
            offered = machine.slots._offered.get(message.slot, (0, None))[1] == message.stamp
            return "offered" if offered else "not offered"
        case Fail():
            part = machine._parts.get(message.generation)
            return _part(part)
    return ""


def _part(part: object) -> str:
    if part is None:
        return "no part"
    state = "ended" if part.ended else "packing" if part.offered < part.segments else "waiting"
    return state if part.room is not None else "early"


def _lost(machine: object, event: pev.ConnectionLost) -> str:
    parts = [part for part in machine._parts.values() if part.connection == event.connection]
    return "open parts" if any(not part.ended for part in parts) else "nothing open"


def _packed(machine: object, event: pev.Packed) -> str:
    part, _ = machine._packing._jobs[event.job]
    return ("over" if part.over else "open") + (", error" if event.error else "")


def _prefill_tick(machine: object, event: object) -> str:
    sent = any(r.sent is not None and not r.settled for r in machine._uses.values())
    offered = ", offered" if machine.slots.offered else ""
    return ("sent" if sent else "early" if len(machine._early) else "open") + offered


# -- states on decode


def _decode_room(room: object) -> str:
    if room is None:
        return "no room"
    if room.decided:
        return "decided, cold" if room.cold else "decided, warm"
    if room.cold:
        return "clearing" if room.clearing else "cold, copies under way"
    state = "pending" if room.pending else "unpacking" if room.unpacking else "reading"
    return state + (", arrived" if room.arrived is not None else "")


def _generation(machine: object, event: object) -> str:
    return _decode_room(machine._rooms.get(event.generation))


def _open_room(machine: object, event: dev.OpenRoom) -> str:
    wanted = [source for source in event.sources if source.heads]
    return "cold" if event.cold else ("" if wanted else "no heads") + (" pending" * event.pending)


def _to_decode(machine: object, event: dev.Received) -> str:
    room = machine._rooms.get(event.message.generation)
    state = _decode_room(room)
    part = room.parts.get(event.peer) if room is not None else None
    if part is not None and type(event.message) is not Fail:
        state += ", doubled" if event.message.segment < part.segments else ""
    return state


def _peer_lost(machine: object, event: dev.PeerLost) -> str:
    rooms = [room for room in machine._rooms.values() if event.peer in room.parts]
    return "in use" if any(room.wants for room in rooms) else "not in use"


def _read(machine: object, event: object) -> str:
    segment = machine._reads._running.get(event.read)
    state = _decode_room(segment.room)
    state = "closed" if segment.room.closed else state
    return state + (", failed" if segment.failed else "")


def _job(machine: object, event: dev.JobDone) -> str:
    room, segment = machine._copies._jobs[event.job]
    what = "clear" if segment is None else "unpack"
    return f"{what}, {event.result}, " + ("closed" if room.closed else _decode_room(room))


def _decode_tick(machine: object, event: object) -> str:
    waits = any(room.wants and room.arrived is not None for room in machine._rooms.values())
    return ("waiting" if waits else "open") + (", reading" if machine._reads.running else "")


_PREFILL = {
    pev.Begin, pev.AddChunk, pev.ChunkWritten, pev.TargetSent, pev.End, pev.Received,
    pev.ConnectionLost, pev.Packed, pev.Tick,
}  # fmt: skip
_STATES = {
    pev.Begin: _begin, pev.AddChunk: _use, pev.ChunkWritten: _use, pev.TargetSent: _use,
    pev.End: _use, pev.Received: _to_prefill, pev.ConnectionLost: _lost, pev.Packed: _packed,
    pev.Tick: _prefill_tick,
    dev.OpenRoom: _open_room, dev.ForwardDone: _generation, dev.TargetArrived: _generation,
    dev.CloseRoom: _generation, dev.Received: _to_decode, dev.PeerLost: _peer_lost,
    dev.ReadDone: _read, dev.ReadFailed: _read, dev.ReadSettled: _read, dev.JobDone: _job,
    dev.Tick: _decode_tick,
}  # fmt: skip
