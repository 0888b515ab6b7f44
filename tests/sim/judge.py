"""A second opinion on a decode rank: of the same events it keeps what it needs to say how long each
room may wait, whose fault a cold one is, and which rooms a breaker holds back. It has no slots, no
reads and no copies of its own, and compares after each event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_mixkv.channel.messages import Fail, Ready
from sglang_mixkv.decode import events as ev
from tests.sim.finding import Finding

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank

STRIKES = 3
FIRST, LONGEST = 1.0, 30.0  # seconds that an open breaker waits for its next probe
EARLY = False
PROBE = 1e9  # seconds after which another may try
AGAIN = 600.0  # seconds in which a number whose request was not warm is doubted
NONE = float("inf")
EPS = 1e-6


@dataclass(slots=True)
class Part:
    """How many segments were announced, are read by now or were, and are in place."""

    announced: int = 0
    begun: int = 0
    placed: int = 0
    reading: int = 0  # reads in flight
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


@dataclass(slots=True)
class Blame:
    """Of a peer: its strikes in a row are `least` to `most`, as far as can be told."""

    least: int = 0
    most: int = 0
    pause: float = 0.0
    until: float = 0.0
    probe: int | None = None
    since: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.least >= STRIKES


@dataclass
class Judge:
    rank: DecodeRank
    rooms: dict[int, Room] = field(default_factory=dict)
    reads: dict[int, tuple[Room, bytes, int]] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)  # reads
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
                blame.probe, blame.since = event.generation, now
        room.warm = not found and not parts

    def _holds(self, peer: bytes, now: float) -> bool:
        blame = self.blames.get(peer)
        if blame is None or not blame.is_open:
            return False
        return now < blame.until or (blame.probe is not None and now < blame.since + PROBE)

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
                type(one) is ev.Forget and one.peer == event.peer
                for one in self.rank.machine._out
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
        room = self.rooms.get(segments[0].room.generation) if segments else None
        if room is not None:
            part = room.parts[action.peer]
            part.begun += len(segments)
            part.reading += 1
            self.reads[action.read] = room, action.peer, len(segments)
            self.began[action.read] = self.rank.now

    def _read(self, event: ev.ReadEnded, now: float) -> None:
        room, peer, _ = self.reads.get(event.read, (None, b"", 0))
        if room is not None:
            room.parts[peer].reading -= 1
            if not (event.error or now > self.began[event.read] + self._limit(room)):
                room.progress = now

    def _limit(self, room: Room) -> float:
        """Of a read."""
        own = self.rank.place.times.patience
        return 5.0 * min([own, *(source.patience for source in room.opened.sources)])

    def _copied(self, event: ev.Copied, now: float) -> None:
        if event.result is not ev.Result.DONE:
            return
        for number in event.jobs:
            receiver, job = self.rank.job_of[number]
            room = self.rooms.get(receiver.generation)
            if room is None or type(job) is ev.Clear:
                continue
            room.progress = now
            for source in room.opened.sources:
                if source.heads == job.heads and source.peer in room.parts:
                    room.parts[source.peer].placed += 1
                    self._came(source.peer, room)

    def _came(self, peer: bytes, room: Room) -> None:
        if EARLY:
            self.blames.pop(peer, None)

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
            for peer, sure in self._guilty(event, room, now):
                self._strike(peer, generation, now, sure)
            self._release(generation)

    def _check_deadline(self, room: Room, now: float) -> None:
        patience = self.rank.place.times.patience
        if now < room.due(patience) - EPS:
            still = now - max(room.arrived or now, room.progress)
            raise self.wrong("deadline", f"cold {still:.3f} s after progress, {room.arrived}")

    def _guilty(self, event: Any, room: Room, now: float) -> list[tuple[bytes, bool]]:
        """Peers that the room's end counts against, and whether it surely does."""
        if room.cold == "deadline":
            found = []
            for peer, part in room.parts.items():
                waits = part.begun < part.announced
                if not part.complete and not (EARLY and waits and not part.reading):
                    found.append((peer, not waits))
            return found
        if room.cold == "read":
            limit = now - self._limit(room)
            for number, (whose, peer, _) in self.reads.items():
                ends = type(event) is ev.ReadEnded and number == event.read
                late = type(event) is ev.Tick and self.began[number] <= limit + EPS
                if whose is room and (ends or late):
                    return [(peer, True)]
            raise self.wrong("strike", "a read is said to fail, and none has")
        if room.cold == "lost" and type(event) is ev.PeerLost:
            return [] if event.gone else [(event.peer, True)]
        return []

    def _ends(self, event: Any, now: float) -> None:
        machine, patience = self.rank.machine, self.rank.place.times.patience
        if type(event) is ev.ReadEnded:
            self.reads.pop(event.read, None)
            self.began.pop(event.read, None)
        for generation, room in self.rooms.items():
            if room.cold or room.warm:
                continue
            parts = room.parts
            if all(part.complete for part in parts.values()):
                room.warm = True
                for peer, part in parts.items():
                    if part.announced:
                        self.blames.pop(peer, None)
                if not machine._rooms[generation].decided:
                    raise self.wrong("late", f"room {generation} is complete, and not warm")
            elif type(event) is ev.Tick and room.due(patience) < now - EPS:
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

    def _strike(self, peer: bytes, generation: int, now: float, sure: bool) -> None:
        blame = self.blames.setdefault(peer, Blame())
        if blame.is_open:
            if blame.probe != generation:
                return
            if not sure and self.rank.machine.breaker._states[peer].until < now:
                return
            blame.pause = min(2 * blame.pause, LONGEST)
        else:
            blame.least, blame.most = blame.least + sure, blame.most + 1
            if blame.least < STRIKES <= blame.most and peer in self.rank.machine.breaker.open_peers():
                blame.least = blame.most
            if not blame.is_open:
                return
            blame.pause = FIRST
        blame.until, blame.probe = now + blame.pause, None

    def _release(self, generation: int) -> None:
        for blame in self.blames.values():
            if blame.probe == generation:
                blame.probe = None

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
