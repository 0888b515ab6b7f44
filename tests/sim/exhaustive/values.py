"""What worlds are made of: values, each equal to its like. A state machine is its fingerprint."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from sglang_mixkv.channel.messages import Ack, Fail, Open, Ready
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as dv
from sglang_mixkv.prefill import events as pv
from sglang_mixkv.prefill import machine as prefill
from sglang_mixkv.prefill import transfer

ROOM, INSTANCES = 7, (b"prefill0", b"prefill1")
Chunks = tuple[tuple[int, int], ...]  # first token, tokens
AGAIN: Chunks = ((0, 1),)  # of the request that gets the room number again
OLD, ZERO = "old", "zero"  # rows of another request; cleared rows
FAULTS = (
    "early", "break", "double", "fail", "hang", "abort", "close", "die", "again", "restart",
)  # fmt: skip
"""`again`: the room number, once no decode rank has a room under it. `anyhow`: at any time."""


class Case(NamedTuple):
    """`tokens` in a segment. `pending`: a forward may still write to the rows of reader 1.
    `copiers`: so many copies of a rank are in flight, and any of them may end first."""

    chunks: Chunks = ((0, 2), (2, 1))
    tokens: int = 1
    slots: int = 2
    local_slots: int = 2
    pending: bool = False
    copiers: int = 3
    faults: tuple[str, ...] = FAULTS

    @property
    def prompts(self) -> tuple[Chunks, ...]:
        return self.chunks, AGAIN


class Content(NamedTuple):
    """What a slot holds."""

    stamp: int
    use: int
    first: int
    count: int
    head: int


class Sender(NamedTuple):
    """SGLang's sender of one request: chunks added, and what has happened to it."""

    begun: bool = False
    chunks: int = 0
    written: bool = False
    sent: bool = False
    settled: bool = False
    ended: bool = False
    failed: bool = False


class Front(NamedTuple):
    """The prefill rank, its packing thread and its slots."""

    machine: int
    slots: tuple[Content | None, ...]
    senders: tuple[Sender, ...] = (Sender(),)
    packs: tuple[pv.PackJob, ...] = ()
    restarted: bool = False


class Seat(NamedTuple):
    """One request on a decode rank. `reason` is not None once its gate is closed."""

    peer: bytes = b""
    arrived: bool = False
    pending: bool = False
    verdict: str = ""
    reason: str | None = None
    closed: bool = False


class Read(NamedTuple):
    """`contents`: of the remote slots, when it began. `state`: it is "running", or "hanging" until
    time has passed, and then "late"."""

    action: dv.StartRead
    contents: tuple[Content | None, ...]
    state: str = "running"


class Reader(NamedTuple):
    """A decode rank, its threads, its pool's rows and its connection, messages in both ways."""

    rank: int
    machine: int
    local: tuple[Content | None, ...]
    seats: tuple[Seat, ...] = (Seat(),)
    up: tuple[Any, ...] = ()
    down: tuple[Any, ...] = ()
    reads: tuple[Read, ...] = ()
    copies: tuple[tuple[Any, dv.Result | None], ...] = ()
    pool: tuple[Any, ...] = ()
    forgotten: bool = False
    connection: int = 0
    alive: bool = True

    @property
    def request(self) -> int:
        return len(self.seats) - 1

    @property
    def generation(self) -> int:
        return 10 * len(self.seats) + self.rank

    @property
    def link(self) -> tuple[int, int] | None:
        """How prefill reaches it."""
        return (self.rank, self.connection) if self.alive else None

    def sit(self, **changed: Any) -> Reader:
        return self._replace(seats=(*self.seats[:-1], self.seats[-1]._replace(**changed)))


class View(NamedTuple):
    """What a reader's steps depend on beside itself. `slots`: those with its own segments."""

    slots: tuple[Content | None, ...]
    arriving: tuple[bool, ...]  # by request: the target may arrive
    failed: tuple[bool, ...]
    restarted: bool


State = tuple[int, ...]  # numbers of a Front and of two Readers
Outs = tuple[tuple[Any, ...], ...]  # messages to each reader
Moved = tuple[Front, Outs]
NOTHING: Outs = ((), ())


class Violation(AssertionError):
    pass


def _marks(slots: Any) -> str:
    """Slots and stamps."""
    pairs = (one if isinstance(one, tuple) else (one.slot, one.stamp) for one in slots)
    return ", ".join(f"{slot}:{stamp}" for slot, stamp in pairs)


def text(message: Any) -> str:
    """A message, or a loss, in short."""
    match message:
        case Open():
            return f"OPEN {message.generation}"
        case Ready():
            what = f"READY {message.generation} from {message.segment} on"
            return f"{what}: {_marks(message.segments)}" + ", the last" * message.last
        case Ack():
            return f"ACK: {_marks(message.slots)}"
        case Fail():
            return f"FAIL {message.generation} ({message.code})"
    return type(message).__name__


def put(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def require(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


AGES = {"sent": 1, "progress": 1, "first_ready": 0, "arrived": 3, "_offered": 4}
"""Seconds by field: ages beyond these are alike, as `Steps` has it. Others: 5."""


class Steps(Times):
    shortest_wait = longest_wait = packing = late_ack = read = stall = 1.0  # type: ignore
    whole_wait, slot_aside, early_room = 3.0, 4.0, 5.0  # type: ignore


class Packing(transfer.Packing):
    """Its stamps follow from what they mark, so that equal worlds look equal."""

    def _stamp(self, part: Any) -> int:
        return part.opened.generation * 10 + part.announced + len(part.packing)


class Prefill(prefill.Machine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packing.__class__ = Packing


_CONSTANT = ("_clock", "_seen", "_times", "_out", "_draw", "_segment_tokens")
_COUNTERS = ("_job", "_number")  # the numbers in use are in the fingerprint, the next one is not
_UNORDERED = {"_owner", "_held"}


def freeze(value: Any, now: float, seen: dict[int, int], name: str = "") -> Hashable:
    """A value that two objects share if they act alike from `now` on."""
    if value is None or isinstance(value, int | str | bytes | range | msgspec.Struct):
        return value
    if isinstance(value, float):
        return min(AGES.get(name, 5), round(now - value))
    if isinstance(value, tuple | list | deque):
        return tuple(freeze(item, now, seen, name) for item in value)
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, dict):
        return tuple(
            (freeze(k, now, seen, name), freeze(v, now, seen, name)) for k, v in value.items()
        )
    if isinstance(value, Enum):
        return value.value
    if id(value) in seen:
        return "the same as", seen[id(value)]
    seen[id(value)] = len(seen)
    names = getattr(value, "__slots__", None) or vars(value)
    fields = {k: getattr(value, k) for k in names if k not in _CONSTANT + _COUNTERS}
    for unordered in _UNORDERED & fields.keys():
        fields[unordered] = dict(sorted(fields[unordered].items()))
    return type(value).__name__, *(freeze(v, now, seen, k) for k, v in fields.items())


class Machine:
    """All states of a machine that were met, by number, and its answers."""

    def __init__(self) -> None:
        self._states: list[bytes] = []
        self._numbers: dict[Hashable, int] = {}
        self._answers: dict[Hashable, tuple[int, list[Any]]] = {}
        self.left: list[dict[str, int]] = []

    def number(self, machine: Any, now: float) -> int:
        clock = machine._clock if isinstance(machine, Prefill) else now
        key = freeze(machine, clock, {})
        if key not in self._numbers:
            require(not (wrong := list(machine.check())), f"check(): {wrong}")
            self._numbers[key] = len(self._states)
            self._states.append(pickle.dumps((machine, now), 5))
            self.left.append(machine.left())
        return self._numbers[key]

    def handle(self, number: int, event: Any, seconds: float = 0.0) -> tuple[int, list[Any]]:
        key = number, event, seconds
        if key not in self._answers:
            machine, now = pickle.loads(self._states[number])
            try:
                machine.handle(event, now + seconds)
                actions = machine.actions()
            except Exception as error:
                raise Violation(f"{type(error).__name__} in {event}: {error}") from error
            self._answers[key] = self.number(machine, now + seconds), actions
        return self._answers[key]
