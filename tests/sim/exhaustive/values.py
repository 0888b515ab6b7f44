"""What worlds are made of: values, each equal to its like."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_mixkv.channel.messages import Ack, Fail, Open, Ready
from sglang_mixkv.decode import events as dv
from sglang_mixkv.prefill import events as pv

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
