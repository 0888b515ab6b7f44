"""Drive one side's state machine by hand. The test acts as the other side, SGLang and the clock.
Copies complete immediately, unless the test holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from rig.channel.invariants import strikes, violations

from sglang_mixkv.channel.messages import Ack, Announced, Fail, Open, Ready, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode.machine import Machine as DecodeMachine
from sglang_mixkv.decode.segments import Job
from sglang_mixkv.decode.transfer import Opened, Source
from sglang_mixkv.draft.copier import Outcome
from sglang_mixkv.draft.slot_format import SlotCheck
from sglang_mixkv.prefill.actions import PagesReleased
from sglang_mixkv.prefill.machine import Machine as PrefillMachine
from sglang_mixkv.prefill.transfer import Segment

PREFILL, READER = b"prefill_", b"reader_0"
TOKENS = 10  # per segment
SLOTS = 64  # in the default staging buffer
BEGAN = 5000.0  # a real clock does not begin at 0


class _Side:
    def __init__(self, slots: int, patience: float) -> None:
        self.times = Times(patience)
        self.slots = SlotPool(slots, self.times)
        self.machine: Any = None
        self.now = BEGAN
        self.notes: list[tuple[bytes, str]] = []
        self.details: list[tuple[str, str]] = []

    def tell(self, method: Callable[..., None], *args: Any, **more: Any) -> None:
        """Call the machine without carrying out its actions."""
        self.machine.advance(self.now)
        method(*args, **more)

    def do(self, method: Callable[..., None], *args: Any, **more: Any) -> None:
        """Call the machine, and carry out its actions."""
        self.tell(method, *args, **more)
        self.act()

    def act(self) -> None:
        while actions := self.machine.actions():
            for action in actions:
                self.meet(action)

    def meet(self, action: Any) -> None:
        raise NotImplementedError

    def until(self, when: float, step: float = 0.1) -> None:
        """Tick until `when` inclusive."""
        step *= self.times.patience
        while self.now + step < when:
            self.now += step
            self.do(self.machine.tick)
        self.now = when
        self.do(self.machine.tick)

    def wait(self, seconds: float) -> None:
        self.until(self.now + seconds)

    @property
    def violations(self) -> list[str]:
        return violations(self.machine)


class Prefill(_Side):
    """A prefill rank's machine.

    `gone`: connections that never answer a READY. `unreachable`: connections to which sending
    fails. `slow`: readers that send an ACK only when the test calls `acknowledge`; others send it
    immediately. `sent`: number of tokens announced, by generation; `pages`: the pages of their
    chunks. `most`: tokens per slot."""

    def __init__(self, slots: int = SLOTS, patience: float = 1.0, most: int = TOKENS) -> None:
        super().__init__(slots, patience)
        self.machine = PrefillMachine(
            PREFILL, range(4), lambda heads, size: most, self.slots, self.times, count(1).__next__
        )
        self.gone, self.unreachable, self.slow = set[bytes](), set[bytes](), set[bytes]()
        self.unread: list[tuple[bytes, tuple[int, int]]] = []
        self.sent: dict[int, int] = {}
        self.pages: dict[int, set[Any]] = {}
        self.fails: dict[int, str] = {}
        self.failed: list[tuple[bytes, Fail]] = []
        self.pages_released: dict[Any, float] = {}
        self._packed: dict[int, Any] = {}  # pages by stamp

    def meet(self, action: Any) -> None:
        match action:
            case dact.StartCopies(segments):
                self.pack(segments)
            case dact.Send(connection) if connection in self.unreachable:
                self.tell(self.machine.unsent, action.message)
                self.do(self.machine.connection_lost, connection)
            case dact.Send(connection, Fail(_, generation, code) as message):
                self.fails[generation] = code
                self.failed.append((connection, message))
            case dact.Send(connection, Ready() as ready) if connection not in self.gone:
                self._ready(connection, ready)
            case PagesReleased(handle):
                assert handle not in self.pages_released
                self.pages_released[handle] = self.now
            case dact.Note(what, reader):
                self.notes.append((reader, what))

    def pack(self, segments: Sequence[Segment]) -> None:
        self._packed.update((one.stamp, one.chunk.pages) for one in segments)
        self.do(self.machine.copied, segments)

    def _ready(self, connection: bytes, ready: Ready) -> None:
        generation = ready.generation
        for one in ready.segments:
            self.sent[generation] = self.sent.get(generation, 0) + one.count
            self.pages.setdefault(generation, set()).add(self._packed[one.stamp])
        slots = tuple((one.slot, one.stamp) for one in ready.segments)
        if connection in self.slow:
            self.unread += [(connection, slot) for slot in slots]
        else:
            self.do(self.machine.received, connection, Ack(slots))

    def acknowledge(self, slots: int = 1 << 20) -> None:
        taken, self.unread = self.unread[:slots], self.unread[slots:]
        for connection, slot in taken:
            self.do(self.machine.received, connection, Ack((slot,)))

    def message(
        self, room: int, reader: bytes = READER, generation: int = 0, readers: int = 1
    ) -> Open:
        """Make an OPEN. `generation`: by default the room's number."""
        return Open(3, room, generation or room, PREFILL, reader, readers, (0, 4), 0, 1 << 20)

    def open(
        self, room: int, reader: bytes = READER, generation: int = 0, readers: int = 1
    ) -> None:
        """Open a room; the reader's name is also its connection."""
        message = self.message(room, reader, generation, readers)
        self.do(self.machine.received, reader, message)

    def close(self, room: int, reader: bytes = READER, generation: int = 0) -> None:
        message = fail(room, generation or room, "closed", "")
        self.do(self.machine.received, reader, message)

    def begin(self, handle: Any, room: int, tokens: int, pages: Any = None) -> None:
        self.tell(self.machine.begin, handle, room)
        self.do(self.machine.add_chunk, handle, 0, tokens, True, pages)

    def request(self, room: int, tokens: int) -> None:
        """Begin a request whose target is already sent."""
        self.begin(room, room, tokens)
        self.do(self.machine.target_sent, room)


class Decode(_Side):
    """A decode rank's machine.

    `hung`: peers whose reads do not complete; `broken`: peers whose reads fail. `held_copies`: if
    it is a list, copies are added to it and do not complete. `verdicts`, `when`: each room's
    outcome and its time, by generation."""

    def __init__(self, slots: int = SLOTS, patience: float = 1.0) -> None:
        super().__init__(slots, patience)
        self.machine = DecodeMachine(READER, self.slots, 1 << 20, self.times)
        self.hung, self.broken = set[bytes](), set[bytes]()
        self.reading: list[dact.StartRead] = []
        self.verdicts: dict[int, tuple[str, str]] = {}
        self.when: dict[int, float] = {}
        self.sends: list[tuple[bytes, Any]] = []
        self.forgotten: list[bytes] = []
        self.result: Outcome = SlotCheck.OK
        self.held_copies: list[Job] | None = None
        self._announced: dict[tuple[int, bytes], int] = {}

    def meet(self, action: Any) -> None:
        match action:
            case dact.StartRead(peer=peer) if peer in self.hung:
                self.reading.append(action)
            case dact.StartRead(peer):
                self.do(self.machine.read_ended, action, "broken" if peer in self.broken else "")
            case dact.StartCopies(jobs) if self.held_copies is not None:
                self.held_copies += jobs
            case dact.StartCopies(jobs):
                for job in jobs:
                    result = SlotCheck.OK if isinstance(job, dact.Clear) else self.result
                    self.do(self.machine.copied, (job,), result)
            case dact.Verdict(handle, state, reason):
                self.verdicts[handle] = state.value, reason
                self.when[handle] = self.now
            case dact.Send(peer, message):
                self.sends.append((peer, message))
            case dact.Forget(peer):
                self.forgotten.append(peer)
            case dact.Note(what, peer, detail):
                self.notes.append((peer, what))
                self.details.append((what, detail))

    def end_reads(self, error: str = "") -> None:
        reading, self.reading = self.reading, []
        for read in reading:
            self.tell(self.machine.read_ended, read, error)
        self.act()

    def open(
        self, generation: int, *peers: bytes, segments: int = 4, patience: float = 99, **more: Any
    ) -> None:
        """Open a request. `segments`: the number that each of these peers sends."""
        sources = tuple(
            Source(peer, range(4), 1, 1 << 20, TOKENS, patience) for peer in peers or (PREFILL,)
        )
        number, end = more.pop("number", generation), segments * TOKENS
        more = {"first_token": 0, "end": end, "handle": generation, **more}
        self.do(self.machine.open, Opened(generation, number, sources, **more))

    def ready(
        self, generation: int, segments: int = 1, peer: bytes = PREFILL, last: bool = False
    ) -> None:
        """Announce the next segments."""
        first = self._announced.get((generation, peer), 0)
        self._announced[generation, peer] = first + segments
        announced = tuple(
            Announced(n, generation << 20 | 1 + n, TOKENS) for n in range(first, first + segments)
        )
        message = Ready(generation, generation, first, first * TOKENS, announced, last)
        self.do(self.machine.ready, peer, message)

    def fail(self, generation: int, code: str, peer: bytes = PREFILL) -> None:
        self.do(self.machine.failed, peer, fail(generation, generation, code, ""))

    def arrive(self, generation: int) -> None:
        self.do(self.machine.target_arrived, generation)

    def close(self, *generations: int, reason: str = "") -> None:
        for generation in generations:
            self.tell(self.machine.close, generation, reason)
        self.act()

    def wants(self, generation: int) -> bool:
        return bool(self.machine._requests[generation].wants)

    def strikes(self, peer: bytes = PREFILL) -> int:
        return strikes(self.machine).get(peer, 0)
