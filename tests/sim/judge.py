"""An independent model of a decode rank's decisions, compared with the machine after each call.

From the machine's calls, the model derives how long each room may wait and which rooms a breaker
blocks. From the network's events (wire.py), it derives which peers a cold room counts against. It
has no slots, reads or copies of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_mixkv.channel.actions import StartCopies
from sglang_mixkv.channel.messages import Fail, Ready
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.transfer import Opened, instance_of
from sglang_mixkv.draft.copier import Outcome
from sglang_mixkv.draft.slot_format import SlotCheck
from tests.sim.finding import Finding

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank

STRIKES = 3
FIRST, LONGEST = 1.0, 30.0  # seconds that an open breaker waits for its next probe
PROBE = 2.0  # seconds after which an open breaker lets another probe through
AGAIN = 600.0  # seconds for which the room number of a request that was not warm is ambiguous
NONE = float("inf")
EPS = 1e-6


@dataclass(slots=True)
class Transfer:
    """The numbers of announced and of unpacked segments."""

    announced: int = 0
    placed: int = 0
    last: bool = False

    @property
    def complete(self) -> bool:
        return self.last and self.placed == self.announced


@dataclass(slots=True)
class Request:
    """The model's request. `own`: the machine's request."""

    opened: Opened
    own: Any
    transfers: dict[bytes, Transfer]
    progress: float
    first: float | None = None  # time of the first READY
    arrived: float | None = None
    cold: str = ""
    warm: bool = False

    def wait(self, patience: float) -> float:
        """Return how long the request may wait after its last progress."""
        assert self.arrived is not None
        took = 0.0 if self.first is None else self.arrived - self.first
        return min(max(3 * took, 0.3 * patience), 1.0 * patience)

    def due(self, patience: float) -> float:
        """Return the time at which the request must go cold."""
        if self.arrived is None:
            return NONE
        calm = max(self.arrived, self.progress) + self.wait(patience)
        return min(calm, self.arrived + 5.0 * patience)


class Reading(NamedTuple):
    request: Request | None
    peer: bytes
    began: float
    segments: int


@dataclass(slots=True)
class Blame:
    """A peer's strikes, and its breaker.

    `until`: the time before which the open breaker blocks all rooms. `probes`: the rooms that it
    let through.
    """

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
    requests: dict[int, Request] = field(default_factory=dict)
    closed: dict[int, Request] = field(default_factory=dict)
    reads: dict[act.StartRead, Reading] = field(default_factory=dict)
    blames: dict[bytes, Blame] = field(default_factory=dict)
    numbers: dict[int, float] = field(default_factory=dict)  # last OPEN, if not warm
    struck: list[tuple[int, bytes]] = field(default_factory=list)  # strikes in this call
    restored: bool = False  # the process was restored from a snapshot
    restarted: set[bytes] = field(default_factory=set)  # peers that the machine must forget

    def wrong(self, what: str, detail: str) -> Finding:
        return Finding(what, f"{self.rank.name}: {detail}")

    # -- calls, after the machine has handled them

    def after_call(self, name: str, args: tuple, now: float) -> None:
        handler = _OF.get(name)
        if handler is not None:
            handler(self, now, *args)
        self._cold_ones(name, args, now)
        if name in _ENDS:
            self._ends(name, args, now)

    def _open(self, now: float, opened: Opened) -> None:
        wanted = [source.peer for source in opened.sources if source.heads]
        own = self.rank.machine._requests.get(opened.generation)
        found = own.cold
        number = opened.bootstrap_room
        since = self.numbers.get(number)
        doubted = since is not None and now - since < AGAIN
        self.numbers[number] = now
        is_dead = self.restored and bool(wanted)
        if is_dead != (found == "restored"):
            raise self.wrong("restored", f"room {number} is opened: {found!r}")
        if wanted and (doubted and not is_dead) != (found == "repeated"):
            raise self.wrong("repeated", f"room {number}: {found!r}, since {since}")
        blocked = not (doubted or is_dead) and any(self._holds(peer, now) for peer in wanted)
        if blocked != (found == "breaker"):
            raise self.wrong("breaker", f"room {number} of {wanted}: {found!r}")
        transfers = {peer: Transfer() for peer in wanted} if not found else {}
        request = Request(opened, own, transfers, now, cold=found)
        self.requests[opened.generation] = request
        for peer in transfers:
            if (blame := self.blames.get(peer)) is not None and blame.is_open:
                blame.probes.add(opened.generation)
                blame.until = now + PROBE
        if not (found or transfers):
            self._is_warm(request)

    def _is_warm(self, request: Request) -> None:
        """Record a warm room. Its number may be reused before its verdict is sent."""
        request.warm = True
        self.numbers.pop(request.opened.bootstrap_room, None)

    def _holds(self, peer: bytes, now: float) -> bool:
        blame = self.blames.get(peer)
        return blame is not None and blame.is_open and now < blame.until

    def _target(self, now: float, generation: int) -> None:
        request = self.requests.get(generation)
        if request is not None and request.arrived is None:
            request.arrived = now

    def _close(self, now: float, generation: int, reason: str) -> None:
        if (request := self.requests.pop(generation, None)) is not None:
            self.closed[generation] = request
            self._release(generation)
            self.rank.wire.not_needed(generation)

    def _restored(self, now: float) -> None:
        self.restored = True
        for generation, request in self.requests.items():
            if not (request.own.cold or request.warm):
                raise self.wrong("restored", f"room {generation} still waits for a dead plane")

    def _failed(self, now: float, peer: bytes, message: Fail) -> None:
        if message.code == "restarted":
            self.restarted.add(peer)

    def after_pass(self, actions: list[act.Action]) -> None:
        """Check the actions of one pass of the channel thread."""
        for action in actions:
            match action:
                case act.StartRead():
                    if self.restored:
                        raise self.wrong("restored", "it starts a read over a dead data plane")
                    self._begun(action)
                case StartCopies(jobs):
                    self.rank.wire.copies(_stamps(jobs))
                case act.Forget(peer):
                    self.restarted.discard(peer)
        if self.restarted:
            raise self.wrong("forget", f"{self.restarted} have restarted, but are not forgotten")

    def _ready(self, now: float, peer: bytes, message: Ready) -> None:
        request = self.requests.get(message.generation)
        transfer = request.transfers.get(peer) if request is not None else None
        if transfer is None or request.cold or request.warm:
            return
        if message.segment != transfer.announced:
            return
        if request.own.cold:  # the machine has rejected this READY
            return
        transfer.announced += len(message.segments)
        transfer.last = message.last
        request.progress = now
        request.first = now if request.first is None else request.first

    def _begun(self, action: act.StartRead) -> None:
        """Record a read of segments of one room."""
        segments = action.segments
        request = self.requests.get(segments[0].request.generation)
        self.reads[action] = Reading(request, action.peer, self.rank.now, len(segments))

    def _read(self, now: float, action: act.StartRead, error: str) -> None:
        read = self.reads[action]
        request = read.request
        if request is not None and not (error or now > read.began + self._limit(request)):
            request.progress = now
        if request is None or request.own.cold or request.opened.generation not in self.requests:
            self.rank.wire.gone(one.announced.stamp for one in action.segments)

    def server_of(self, read: act.StartRead) -> int:
        """Return the number of the server whose slots the action reads."""
        peer = self.reads[read].peer
        return self.rank.world.place_of[instance_of(peer)].server.number

    def _limit(self, request: Request) -> float:
        """Return how long a read may take."""
        own = self.rank.place.times.patience
        return 5.0 * min([own, *(source.patience for source in request.opened.sources)])

    def _copied(self, now: float, jobs: Any, outcome: Outcome) -> None:
        self.rank.wire.gone(_stamps(jobs))
        if outcome is not SlotCheck.OK:
            return
        for job in jobs:
            # a copy that ends while its room closes still proves that its peer delivers
            number = job.request.generation
            request = self.requests.get(number) or self.closed.get(number)
            if request is None or isinstance(job, act.Clear):
                continue
            request.progress = now
            for source in request.opened.sources:
                if source.heads == job.transfer.source.heads and source.peer in request.transfers:
                    request.transfers[source.peer].placed += 1
                    if request.transfers[source.peer].placed == 1:
                        self._came(source.peer)

    def _came(self, peer: bytes) -> None:
        """Record a room's first segment, which closes the breaker until the next strike."""
        if (blame := self.blames.get(peer)) is not None and blame.is_open:
            blame.strikes = STRIKES - 1

    # -- rooms that a call ends

    def _cold_ones(self, name: str, args: tuple, now: float) -> None:
        for generation, request in self.requests.items():
            found = request.own.cold
            if not found or request.cold:
                continue
            if request.warm:
                raise self.wrong("cold", f"room {generation} is warm, and then {found}")
            request.cold = found
            struck = [peer for number, peer in self.struck if number == generation]
            if found == "deadline":
                self._check_deadline(request, now)
                self._check_blame(request, struck)
            elif (right := self._guilty(name, args, request, now)) != struck:
                raise self.wrong("strike", f"room {generation}, {found}: {struck}, not {right}")
            self.rank.wire.not_needed(generation)
            for peer in struck:
                self._strike(peer, generation, now)
            self._release(generation)
        self.struck.clear()

    def _check_deadline(self, request: Request, now: float) -> None:
        patience = self.rank.place.times.patience
        if now < request.due(patience) - EPS:
            still = now - max(request.arrived or now, request.progress)
            raise self.wrong("deadline", f"cold {still:.3f} s after progress, {request.arrived}")

    def _guilty(self, name: str, args: tuple, request: Request, now: float) -> list[bytes]:
        """Return the peers that get a strike for a cold room, unless the room was merely late."""
        if request.cold == "read":
            limit = now - self._limit(request) + EPS
            for action, read in self.reads.items():
                ends = name == "read_ended" and action is args[0]
                if read.request is request and (ends or (name == "tick" and read.began <= limit)):
                    return [read.peer]
            raise self.wrong("strike", "a room is cold because of a failed read, but none failed")
        if request.cold == "lost":
            peer, gone = args
            return [] if gone else [peer]
        return []

    def _check_blame(self, request: Request, struck: list[bytes]) -> None:
        """Check which peers get a strike for a late room."""
        late = [peer for peer, transfer in request.transfers.items() if not transfer.complete]
        for peer in {*late, *struck}:
            right = self.rank.wire.is_to_blame(peer) if peer in late else False
            if right is not None and right != (peer in struck):
                raise self.wrong("blame", f"{peer} is{' not' * (peer not in struck)} struck")

    def _ends(self, name: str, args: tuple, now: float) -> None:
        patience = self.rank.place.times.patience
        lost, gone = args if name == "peer_lost" else (None, False)
        if name == "read_ended":
            del self.reads[args[0]]
        for generation, request in self.requests.items():
            if request.cold or request.warm:
                continue
            transfers = request.transfers
            for transfer in transfers.values():
                if not (transfer.last and transfer.placed == transfer.announced):
                    break
            else:
                self._is_warm(request)
                for peer, transfer in transfers.items():
                    if transfer.announced:
                        self.blames.pop(peer, None)
                if not request.own.decided:
                    raise self.wrong("late", f"room {generation} is complete, but not warm")
                continue
            if name == "tick" and request.due(patience) < now - EPS:
                waited = f"{now - request.arrived:.2f} s for the target"
                still = f"{now - request.progress:.2f} s since progress"
                raise self.wrong("late", f"room {generation} still waits, {waited}, {still}")
            elif lost in transfers:
                transfer = transfers[lost]
                if not (transfer.complete if gone else transfer.last):
                    raise self.wrong("lost", f"room {generation} still waits for {lost}")
        if gone:
            self.blames.pop(lost, None)
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
        """Compare the open breakers of the model and the machine."""
        own = {peer for peer, blame in self.blames.items() if blame.is_open}
        if own != (found := set(self.rank.machine.breaker.open_peers())):
            raise self.wrong("breaker", f"expected {sorted(own)} to be open, got {sorted(found)}")


def _stamps(jobs: Any) -> list[int]:
    return [job.announced.stamp for job in jobs if not isinstance(job, act.Clear)]


_OF: dict[str, Any] = {
    "open": Judge._open,
    "target_arrived": Judge._target,
    "close": Judge._close,
    "ready": Judge._ready,
    "failed": Judge._failed,
    "restored": Judge._restored,
    "read_ended": Judge._read,
    "copied": Judge._copied,
}
_ENDS = {"ready", "failed", "read_ended", "copied", "tick", "peer_lost", "open"}
