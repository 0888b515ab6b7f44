"""A second opinion on a decode rank: of the same events it keeps what it needs to say how long each
room may wait, whose fault a cold one is, and which rooms a breaker holds back. It has no slots, no
reads and no copies of its own, and compares after each event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_mixkv.channel.messages import Fail
from sglang_mixkv.decode import events as ev
from tests.sim.finding import Finding

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank

STRIKES = 3
FIRST, LONGEST = 1.0, 30.0  # seconds that an open breaker waits for its next probe
PROBE = 2.0  # seconds after which another may try
AGAIN = 600.0  # seconds in which a number whose request was not warm is doubted
NONE = float("inf")
EPS = 1e-6


@dataclass(slots=True)
class Part:
    """How many segments were announced, and are in place."""

    announced: int = 0
    placed: int = 0
    last: bool = False

    @property
    def complete(self) -> bool:
        return self.last and self.placed == self.announced


@dataclass(slots=True)
class Room:
    opened: ev.OpenRoom
    parts: dict[bytes, Part]
    progress: float
    first: float | None = None  # READY
    arrived: float | None = None
    cold: str = ""
    warm: bool = False

    def wait(self, patience: float) -> float:
        """From the last progress on."""
        assert self.arrived is not None
        took = 0.0 if self.first is None else self.arrived - self.first
        return min(max(3 * took, 0.3 * patience), 1.0 * patience)

    def due(self, patience: float) -> float:
        """When it is to be cold."""
        if self.arrived is None:
            return NONE
        calm = max(self.arrived, self.progress) + self.wait(patience)
        return min(calm, self.arrived + 5.0 * patience)


class Reading(NamedTuple):
    room: Room | None
    peer: bytes
    began: float
    segments: int


@dataclass(slots=True)
class Blame:
    """Of a peer. `until`: no room is let through before then; `probes`: those that were."""

    strikes: int = 0
    pause: float = 0.0
    until: float = 0.0
    probes: set[int] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return self.strikes >= STRIKES


@dataclass
class Judge:
    rank: DecodeRank
    rooms: dict[int, Room] = field(default_factory=dict)
    reads: dict[int, Reading] = field(default_factory=dict)
    blames: dict[bytes, Blame] = field(default_factory=dict)
    numbers: dict[int, float] = field(default_factory=dict)  # not warm the last time, since

    def wrong(self, what: str, detail: str) -> Finding:
        return Finding(what, f"{self.rank.name}: {detail}")

    # -- events, when the machine has handled them

    def handled(self, event: Any, now: float) -> None:
        handler = _OF.get(type(event))
        if handler is not None:
            handler(self, event, now)
        if self.rank.machine._out:
            self._cold_ones(event, now)
        if type(event) in _ENDS:
            self._ends(event, now)

    def _open(self, event: ev.OpenRoom, now: float) -> None:
        wanted = [source.peer for source in event.sources if source.heads]
        found = self.rank.machine._rooms[event.generation].cold
        number = event.bootstrap_room
        since = self.numbers.get(number)
        doubted = since is not None and now - since < AGAIN
        self.numbers[number] = now
        if wanted and doubted != (found == "repeated"):
            raise self.wrong("repeated", f"room {number}: {found!r}, since {since}")
        blocked = not doubted and any(self._holds(peer, now) for peer in wanted)
        if blocked != (found == "breaker"):
            raise self.wrong("breaker", f"room {number} of {wanted}: {found!r}")
        parts = {peer: Part() for peer in wanted} if not found else {}
        room = self.rooms[event.generation] = Room(event, parts, now, cold=found)
        for peer in parts:
            if (blame := self.blames.get(peer)) is not None and blame.is_open:
                blame.probes.add(event.generation)
                blame.until = now + PROBE
        room.warm = not found and not parts

    def _holds(self, peer: bytes, now: float) -> bool:
        blame = self.blames.get(peer)
        return blame is not None and blame.is_open and now < blame.until

    def _target(self, event: ev.TargetArrived, now: float) -> None:
        room = self.rooms.get(event.generation)
        if room is not None and room.arrived is None:
            room.arrived = now

    def _close(self, event: ev.CloseRoom, now: float) -> None:
        if self.rooms.pop(event.generation, None) is not None:
            self._release(event.generation)

    def _received(self, event: ev.Received, now: float) -> None:
        message, room = event.message, self.rooms.get(event.message.generation)
        if type(message) is Fail:
            if message.code == "restarted" and not any(
                type(one) is ev.Forget and one.peer == event.peer for one in self.rank.machine._out
            ):
                raise self.wrong("forget", f"{event.peer} was restarted, and is not asked anew")
            return
        part = room.parts.get(event.peer) if room is not None else None
        if part is None or room.cold or room.warm or message.segment != part.announced:
            return
        if self.rank.machine._rooms[message.generation].cold:  # it cannot be true
            return
        part.announced += len(message.segments)
        part.last = message.last
        room.progress = now
        room.first = now if room.first is None else room.first

    def begun(self, action: ev.StartRead, segments: Any) -> None:
        """A read, of so many segments of one room."""
        room = self.rooms.get(segments[0].room.generation)
        self.reads[action.read] = Reading(room, action.peer, self.rank.now, len(segments))

    def _read(self, event: ev.ReadEnded, now: float) -> None:
        read = self.reads[event.read]
        room = read.room
        if room is not None and not (event.error or now > read.began + self._limit(room)):
            room.progress = now

    def server_of(self, read: int) -> int:
        """Whose slots it reads."""
        peer = self.reads[read].peer
        return self.rank.world.place_of[ev.instance_of(peer)].server.number

    def _limit(self, room: Room) -> float:
        """Of a read."""
        own = self.rank.place.times.patience
        return 5.0 * min([own, *(source.patience for source in room.opened.sources)])

    def _copied(self, event: ev.Copied, now: float) -> None:
        if event.result is not ev.Result.DONE:
            return
        for number in event.jobs:
            receiver, heads = self.rank.job_of[number]
            room = self.rooms.get(receiver.generation)
            if room is None or heads is None:
                continue
            room.progress = now
            for source in room.opened.sources:
                if source.heads == heads and source.peer in room.parts:
                    room.parts[source.peer].placed += 1
                    if room.parts[source.peer].placed == 1:
                        self._came(source.peer)

    def _came(self, peer: bytes) -> None:
        """The first segment of a room: others are let through, until the next strike."""
        if (blame := self.blames.get(peer)) is not None and blame.is_open:
            blame.strikes = STRIKES - 1

    # -- rooms that end by an event

    def _cold_ones(self, event: Any, now: float) -> None:
        for generation, room in self.rooms.items():
            found = self.rank.machine._rooms[generation].cold
            if not found or room.cold:
                continue
            if room.warm:
                raise self.wrong("cold", f"room {generation} is warm, and then {found}")
            room.cold = found
            if found == "deadline":
                self._check_deadline(room, now)
            for peer in self._guilty(event, room, now):
                self._strike(peer, generation, now)
            self._release(generation)

    def _check_deadline(self, room: Room, now: float) -> None:
        patience = self.rank.place.times.patience
        if now < room.due(patience) - EPS:
            still = now - max(room.arrived or now, room.progress)
            raise self.wrong("deadline", f"cold {still:.3f} s after progress, {room.arrived}")

    def _guilty(self, event: Any, room: Room, now: float) -> list[bytes]:
        """Peers that the room's end counts against."""
        if room.cold == "deadline":
            late = [peer for peer, part in room.parts.items() if not part.complete]
            return [peer for peer in late if not self._waits(room, peer, now)]
        if room.cold == "read":
            limit = now - self._limit(room) + EPS
            for number, read in self.reads.items():
                ends = type(event) is ev.ReadEnded and number == event.read
                if read.room is room and (ends or (type(event) is ev.Tick and read.began <= limit)):
                    return [read.peer]
            raise self.wrong("strike", "a read is said to have failed, and none has")
        if room.cold == "lost":
            return [] if event.gone else [event.peer]
        return []

    def _waits(self, room: Room, peer: bytes, now: float) -> bool:
        """For this rank, with no read that runs for long: for a slot, a forward or a copy."""
        part, since = room.parts[peer], now - 0.3 * self.rank.place.times.patience
        reads = [read for read in self.reads.values() if read.peer == peer]
        reading = sum(read.segments for read in reads if read.room is room)
        is_here = part.announced - part.placed > reading
        return is_here and all(read.began > since for read in reads)

    def _ends(self, event: Any, now: float) -> None:
        machine, patience = self.rank.machine, self.rank.place.times.patience
        if type(event) is ev.ReadEnded:
            del self.reads[event.read]
        for generation, room in self.rooms.items():
            if room.cold or room.warm:
                continue
            parts = room.parts
            for part in parts.values():
                if not (part.last and part.placed == part.announced):
                    break
            else:
                room.warm = True
                for peer, part in parts.items():
                    if part.announced:
                        self.blames.pop(peer, None)
                if not machine._rooms[generation].decided:
                    raise self.wrong("late", f"room {generation} is complete, and not warm")
                continue
            if type(event) is ev.Tick and room.due(patience) < now - EPS:
                waited = f"{now - room.arrived:.2f} s for the target, {now - room.progress:.2f} s"
                raise self.wrong("late", f"room {generation} still waits, {waited} since progress")
            elif type(event) is ev.PeerLost and event.peer in parts:
                part = parts[event.peer]
                if not (part.complete if event.gone else part.last):
                    raise self.wrong("lost", f"room {generation} still waits for {event.peer}")
        if type(event) is ev.PeerLost and event.gone:
            self.blames.pop(event.peer, None)
        self._compare()

    # -- breakers

    def _strike(self, peer: bytes, generation: int, now: float) -> None:
        blame = self.blames.setdefault(peer, Blame())
        if blame.is_open and generation not in blame.probes:
            return
        blame.strikes += 1
        if blame.is_open:
            blame.pause = min(2 * blame.pause, LONGEST) or FIRST
            blame.until = now + blame.pause
            blame.probes.clear()

    def _release(self, generation: int) -> None:
        for blame in self.blames.values():
            if blame.probes == {generation}:
                blame.until = 0.0
            blame.probes.discard(generation)

    def _compare(self) -> None:
        """Which breakers are open."""
        breaker = self.rank.machine.breaker
        if not (self.blames or breaker._states):
            return
        own = {peer for peer, blame in self.blames.items() if blame.is_open}
        if own != (found := set(breaker.open_peers())):
            raise self.wrong("breaker", f"open {sorted(found)}, in the place of {sorted(own)}")

    def said(self, verdict: ev.Verdict) -> None:
        if verdict.state is ev.State.WARM:
            self.numbers.pop(verdict.handle.opened.bootstrap_room, None)


_OF: dict[type, Any] = {
    ev.OpenRoom: Judge._open,
    ev.TargetArrived: Judge._target,
    ev.CloseRoom: Judge._close,
    ev.Received: Judge._received,
    ev.ReadEnded: Judge._read,
    ev.Copied: Judge._copied,
}
_ENDS = {ev.Received, ev.ReadEnded, ev.Copied, ev.Tick, ev.PeerLost, ev.OpenRoom}
