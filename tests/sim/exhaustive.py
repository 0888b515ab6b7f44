"""Every order of events of one request with two readers: an explicit-state model checker.

A *world* is the two state machines' real code and what is around them: messages on their way (in
order, per connection), the packing and the copying threads (in order), reads (in any order), what
is in each slot and in each row of the pool (not bytes: whose they are), and SGLang's own steps.
`World.steps` lists what can happen next, `World.disturbances` what can go wrong now; `Search` goes
on from every world that can be reached, and asks of each what must hold.

What makes the number of worlds bearable, and why nothing is missed:

* Equal worlds are visited once. A machine's state is named by a fingerprint (`freeze`) in which
  times are ages. The machines are deterministic and compare times with each other alone, so equal
  fingerprints act alike; an answer is worked out once for each state and event.
* A world is three numbers: the prefill side and two readers. What a reader can do depends on
  itself and on a `View` of prefill, and is worked out once for each pair of them.
* A copy is made when its end is handled, or just before its gate closes. Between, nothing else
  depends on whether it was made, so other moments lead to the same worlds.
* Worlds are searched by the number of disturbances. One that was reached with fewer is not visited
  again: from there everything was tried that more could lead to.
* Time passes if nothing else can happen, or as a disturbance (`early`). A world in which nothing
  happens and time changes nothing is an end, and has to be clean.

A tick is a second, and `Steps` are the channel's times in these: in the order of the real ones,
and `slot_aside` longer than a READY on its way and its read together.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec

from sglang_mixkv.channel.messages import Ack, Fail, Open, Ready
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as dv
from sglang_mixkv.decode import rooms as decode
from sglang_mixkv.prefill import events as pv
from sglang_mixkv.prefill import packing
from sglang_mixkv.prefill import rooms as prefill

ROOM, SLOT_BYTES, INSTANCES = 7, 100, (b"prefill0", b"prefill1")
Chunks = tuple[tuple[int, int], ...]  # first token, tokens
AGAIN: Chunks = ((0, 1),)  # of the request that gets the room number again
OLD, ZERO = "old", "zero"  # rows of another request; cleared rows
AGES = {"sent": 1, "progress": 1, "first_ready": 0, "arrived": 3, "started": 2, "_offered": 4}
"""Seconds by field: ages beyond these are alike, as `Steps` has it. Others: 5."""
FAULTS = (
    "early", "break", "double", "fail", "hang", "abort", "close", "die", "again", "restart",
)  # fmt: skip
"""`again`: the room number, once no decode rank has a room under it. `anyhow`: at any time."""


class Steps(Times):
    shortest_wait = longest_wait = packing = late_ack = read = stall = 1.0  # type: ignore
    whole_wait, slot_aside, early_room = 3.0, 4.0, 5.0  # type: ignore


class Case(NamedTuple):
    """`tokens` in a segment. `pending`: a forward may still write to the rows of reader 1."""

    chunks: Chunks = ((0, 2), (2, 1))
    tokens: int = 1
    slots: int = 2
    local_slots: int = 2
    pending: bool = False
    faults: tuple[str, ...] = FAULTS

    @property
    def prompts(self) -> tuple[Chunks, ...]:
        return self.chunks, AGAIN


class Packing(packing.Packing):
    """Its stamps follow from what they mark, so that equal worlds look equal."""

    def _stamp(self, part: Any) -> int:
        return part.opened.generation * 10 + part.segments


class Prefill(prefill.Rooms):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packing.__class__ = Packing


class Content(NamedTuple):
    """What a slot holds. `use` is -1 where the pages were given back while they were packed."""

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
    packs: tuple[pv.Pack, ...] = ()
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
    action: dv.StartRead
    content: Content | None  # of the remote slot, when it began
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


def text(message: Any) -> str:
    """A message, or a loss, in short."""
    match message:
        case Open():
            return f"OPEN {message.generation}"
        case Ready():
            what = f"READY {message.generation}.{message.segment}, stamp {message.stamp}"
            return f"{what} in slot {message.slot}" + ", the last" * message.last
        case Ack():
            return f"ACK of stamp {message.stamp} in slot {message.slot}"
        case Fail():
            return f"FAIL {message.generation} ({message.code})"
    return type(message).__name__


def put(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def require(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


_CONSTANT = ("_clock", "_seen", "_now", "_times", "_out", "_draw", "_segment_tokens")
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
        return tuple((k, freeze(v, now, seen, name)) for k, v in value.items())
    if id(value) in seen:
        return "the same as", seen[id(value)]
    seen[id(value)] = len(seen)
    fields = {k: v for k, v in vars(value).items() if k not in _CONSTANT + _COUNTERS}
    for unordered in _UNORDERED & fields.keys():
        fields[unordered] = dict(sorted(fields[unordered].items()))
    if fields.get("room"):
        fields.pop("since", None)  # a part with a room does not expire
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
                actions = machine.handle(event, now + seconds)
            except Exception as error:
                raise Violation(f"{type(error).__name__} in {event}: {error}") from error
            self._answers[key] = self.number(machine, now + seconds), actions
        return self._answers[key]


class PrefillSide:
    """What can happen on the prefill rank. `links`: how it reaches each living reader."""

    def __init__(self, case: Case, rooms: type[Any]) -> None:
        self.case, self.machine, times = case, Machine(), Steps()
        self.fresh = [
            self.machine.number(
                rooms(name, range(2), _fit, SlotPool(case.slots, times), times, None), 100.0
            )
            for name in INSTANCES
        ]

    def start(self) -> Front:
        return Front(self.fresh[0], (None,) * self.case.slots)

    def handle(self, front: Front, links: Any, event: Any, seconds: float = 0.0) -> Moved:
        machine, actions = self.machine.handle(front.machine, event, seconds)
        front, outs = front._replace(machine=machine), [[], []]
        for action in actions:
            match action:
                case pv.Pack():
                    front = self._begin_packing(front, action)
                case pv.Send():
                    outs[action.connection[0]].append(self._sent(front, links, action))
                case pv.Settled():
                    front = self._changed(front, action.use, settled=True)
        return front, tuple(map(tuple, outs))

    def _begin_packing(self, front: Front, action: pv.Pack) -> Front:
        late = action.rows == self.case.prompts[action.use][-1][0]
        require(front.senders[action.use].written or not late, f"is not written yet: {action}")
        slots = put(front.slots, action.slot, None)
        return front._replace(packs=(*front.packs, action), slots=slots)

    def _sent(self, front: Front, links: Any, action: pv.Send) -> Any:
        """The message, or what prefill notices of a connection that is lost."""
        message = action.message
        if isinstance(message, Ready) and message.count:
            content = front.slots[message.slot]
            require(content and content.stamp == message.stamp, f"is not in its slot: {message}")
        reachable = links[action.connection[0]] == action.connection
        return message if reachable else pv.ConnectionLost(action.connection)

    def _changed(self, front: Front, use: int, **changed: Any) -> Front:
        sender = front.senders[use]._replace(**changed)
        return front._replace(senders=put(front.senders, use, sender))

    def steps(self, front: Front, links: Any) -> Iterator[tuple[str, Moved]]:
        if front.packs:
            job = front.packs[0]
            use = -1 if front.senders[job.use].ended else job.use
            content = Content(job.stamp, use, job.rows + job.offset, job.count, job.heads.start)
            slots = put(front.slots, job.slot, content)
            after = front._replace(packs=front.packs[1:], slots=slots)
            event = pv.Packed(job.job)
            yield f"stamp {job.stamp} is packed", self.handle(after, links, event)
        for use, sender in enumerate(front.senders):
            for what, changed, event in self._sglang(use, sender):
                after = self._changed(front, use, **changed)
                yield f"prefill, request {use}: {what}", self.handle(after, links, event)

    def _sglang(self, use: int, sender: Sender) -> Iterator[tuple[str, dict[str, Any], Any]]:
        n, chunks = sender.chunks, self.case.prompts[use]
        if sender.ended:
            return
        if not sender.begun:
            yield "begins", {"begun": True}, pv.Begin(use, ROOM)
        elif n < len(chunks):
            last = n == len(chunks) - 1
            chunk = pv.AddChunk(use, *chunks[n], last, rows=chunks[n][0], pending=last)
            yield f"chunk {n} is added", {"chunks": n + 1}, chunk
        else:
            if not sender.written:
                yield "the last chunk is written", {"written": True}, pv.ChunkWritten(use)
            if not sender.sent:
                yield "the target is sent", {"sent": True}, pv.TargetSent(use)
            if sender.settled and sender.sent:
                yield "SGLang's Success", {"ended": True}, pv.End(use)

    def faults(self, front: Front, links: Any) -> Iterator[tuple[str, Moved]]:
        for use, sender in enumerate(front.senders):
            if "abort" in self.case.faults and sender.begun and not sender.ended:
                after = self._changed(front, use, ended=True, failed=True)
                what = f"prefill, request {use}: aborted"
                yield what, self.handle(after, links, pv.End(use, "aborted"))

    def again(self, front: Front) -> Front:
        """Another request gets the room number."""
        more = len(front.senders) == 1 and front.senders[0].begun
        return front._replace(senders=(*front.senders, Sender())) if more else front

    def restarted(self, front: Front) -> Front:
        ended = tuple(s._replace(ended=True, failed=not s.ended) for s in front.senders)
        return Front(self.fresh[1], (None,) * self.case.slots, ended, (), True)

    def view(self, front: Front, rank: int) -> View:
        return View(
            tuple(c if c and c.head == rank else None for c in front.slots),
            tuple(s.chunks == len(self.case.prompts[r]) for r, s in enumerate(front.senders)),
            tuple(s.failed for s in front.senders),
            front.restarted,
        )

    def check_end(self, front: Front) -> None:
        require(all(s.ended for s in front.senders), f"prefill never settles: {front.senders}")
        left = self.machine.left[front.machine]
        require(not left, f"left on prefill: {left}")


def _fit(heads: int, slot_bytes: int) -> int:
    return slot_bytes  # a token has one byte


class DecodeSide:
    """What can happen on a decode rank, the reader. `view`: what it sees of prefill."""

    def __init__(self, case: Case, rooms: type[Any]) -> None:
        self.case, self.machine, self.times = case, Machine(), Steps()
        self._rooms = rooms

    def start(self, rank: int) -> Reader:
        slots = SlotPool(self.case.local_slots, self.times)
        rooms = self._rooms(b"decode_%d" % rank, slots, self.case.tokens, self.times)
        return Reader(rank, self.machine.number(rooms, 100.0), (None,) * self.case.local_slots)

    def handle(self, reader: Reader, view: View, event: Any, seconds: float = 0.0) -> Reader:
        machine, actions = self.machine.handle(reader.machine, event, seconds)
        reader = reader._replace(machine=machine)
        for action in actions:
            reader = self._do(reader, view, action)
        return reader

    def _do(self, reader: Reader, view: View, action: Any) -> Reader:
        match action:
            case dv.Send():
                event = pv.Received((reader.rank, reader.connection), action.message)
                return reader._replace(up=(*reader.up, event))
            case dv.StartRead():
                return self._start_read(reader, view, action)
            case dv.GiveUpRead():
                n = [r.action.read for r in reader.reads].index(action.read)
                given_up = reader.reads[n]._replace(state="given up")
                return reader._replace(reads=put(reader.reads, n, given_up))
            case dv.Unpack() | dv.Clear():
                return reader._replace(copies=(*reader.copies, (action, None)))
            case dv.Verdict():
                return self._decided(reader, action)
            case dv.Forget():
                return reader._replace(forgotten=True)
        return reader

    def _start_read(self, reader: Reader, view: View, action: dv.StartRead) -> Reader:
        used = [r.action.local_slot for r in reader.reads]
        used += [a.slot for a, _ in reader.copies if isinstance(a, dv.Unpack)]
        require(action.local_slot not in used, f"bytes may still land in its slot: {action}")
        read = Read(action, view.slots[action.remote_slot])
        local = put(reader.local, action.local_slot, None)
        return reader._replace(reads=(*reader.reads, read), local=local)

    def _decided(self, reader: Reader, verdict: dv.Verdict) -> Reader:
        seat, r = reader.seats[-1], reader.request
        require(verdict.generation == reader.generation, f"of a former request: {verdict}")
        require(not seat.verdict and not seat.closed, f"twice, or too late: {verdict}")
        for token in range(sum(self.case.prompts[r][-1])) if seat.reason is None else ():
            row, right = reader.pool[token], (r, token, reader.rank)
            fits = row == right or (verdict.state == "cold" and row == ZERO)
            require(fits, f"row {token} of reader {reader.rank} holds {row}: {verdict}")
        return reader.sit(verdict=str(verdict.state))

    def steps(self, reader: Reader, view: View, others: Any) -> Iterator[tuple[str, Reader]]:
        """`others`: of the other reader, by request, whether the request failed there."""
        if not reader.alive:
            return
        name = f"decode {reader.rank}, request {reader.request}: "
        if reader.down:
            after = self.receive(reader._replace(down=reader.down[1:]), view, reader.down[0])
            yield f"decode {reader.rank} gets {text(reader.down[0])}", after
        if reader.copies:
            yield self._copied(reader, view)
        for n, read in enumerate(reader.reads):
            yield from self._read_ends(reader, view, n, read)
        for what, after, event in self._sglang(reader, view):
            yield name + what, self.handle(after, view, event)
        yield from self._closings(reader, view, others)
        if reader.seats[-1].closed and len(view.failed) > len(reader.seats):
            yield name + "the number comes again", reader._replace(seats=(*reader.seats, Seat()))

    def receive(self, reader: Reader, view: View, message: Any) -> Reader:
        if isinstance(message, dv.PeerLost):
            return self.handle(reader, view, message)
        peer = reader.seats[min(message.generation // 10, len(reader.seats)) - 1].peer
        return self.handle(reader, view, dv.Received(peer, message))

    def _sglang(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader, Any]]:
        seat, r, generation = reader.seats[-1], reader.request, reader.generation
        if seat.closed:
            return
        if not seat.peer:
            peer, end = INSTANCES[reader.forgotten], sum(self.case.prompts[r][-1]) + 1
            rank, pending = reader.rank, self.case.pending and reader.rank == 1
            source = dv.Source(
                peer, range(rank, rank + 1), 2, self.case.slots, self.case.tokens
            )  # fmt: skip
            event = dv.OpenRoom(generation, ROOM, (source,), 0, end, pending=pending)
            after = reader._replace(pool=(OLD,) * end).sit(peer=peer, pending=pending)
            yield "opens", after, event
            return
        if seat.pending:
            yield "the forward is done", reader.sit(pending=False), dv.ForwardDone(generation)
        if seat.reason is not None:
            event = dv.CloseRoom(generation, seat.reason)
            yield "closes", reader.sit(closed=True), event
        elif not seat.arrived and view.arriving[r]:
            yield "the target arrives", reader.sit(arrived=True), dv.TargetArrived(generation)

    def _closings(self, reader: Reader, view: View, others: Any) -> Iterator[tuple[str, Reader]]:
        seat, r = reader.seats[-1], reader.request
        if not seat.peer or seat.reason is not None:
            return
        if seat.arrived and seat.verdict in ("warm", "cold"):
            yield from self._close_gate(reader, view, "")
        elif view.failed[r] or seat.verdict == "failed" or (r < len(others) and others[r]):
            yield from self._close_gate(reader, view, "the group failed")

    def _close_gate(self, reader: Reader, view: View, reason: str) -> Iterator[tuple[str, Reader]]:
        """Copies that were made before, and whose end was not handled yet, stay made."""
        for made in range(len(reader.copies) + 1):
            after = reader
            for n in range(made):
                after, result = self._copy(after, view, n)
                after = after._replace(copies=put(after.copies, n, (after.copies[n][0], result)))
            what = f"decode {reader.rank}: the gate closes after {made} copies ({reason})"
            yield what, after.sit(reason=reason)._replace(pool=())

    def _read_ends(
        self, reader: Reader, view: View, n: int, read: Read
    ) -> Iterator[tuple[str, Reader]]:
        action, name = read.action, f"decode {reader.rank}: read {read.action.read} "
        after = reader._replace(reads=reader.reads[:n] + reader.reads[n + 1 :])
        if read.state in ("landing", "given up"):
            yield name + "cannot land", self.handle(after, view, dv.ReadSettled(action.read))
        if read.state in ("running", "given up"):
            if view.slots[action.remote_slot] == read.content:
                after = after._replace(local=put(after.local, action.local_slot, read.content))
            yield name + "is done", self.handle(after, view, dv.ReadDone(action.read))

    def _copied(self, reader: Reader, view: View) -> tuple[str, Reader]:
        after, result = self._copy(reader, view, 0)
        action = reader.copies[0][0]
        after = after._replace(copies=reader.copies[1:])
        what = f"decode {reader.rank}: {type(action).__name__} {action.job}: {result}"
        return what, self.handle(after, view, dv.JobDone(action.job, result))

    def _copy(self, reader: Reader, view: View, n: int) -> tuple[Reader, dv.Result]:
        """What the copying thread does, through the gate."""
        (action, made), seat = reader.copies[n], reader.seats[-1]
        if made is not None:
            return reader, made
        if seat.reason is not None or action.generation != reader.generation:
            return reader, dv.Result.CLOSED
        require(not seat.verdict, f"rows are written after the verdict: {action}")
        if isinstance(action, dv.Clear):
            rows = [ZERO] * (action.end - action.first_token)
        else:
            content = reader.local[action.slot]
            if content is None or content.stamp != action.stamp:
                require(view.restarted, f"its slot was used again during the read: {action}")
                return reader, dv.Result.STALE
            rows = [(content.use, content.first + k, content.head) for k in range(action.tokens)]
        first = action.first_token
        pool = (*reader.pool[:first], *rows, *reader.pool[first + len(rows) :])
        return reader._replace(pool=pool), dv.Result.DONE

    def faults(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        if reader.alive:
            for kind in self.case.faults:
                for what, after in getattr(self, "_fault_" + kind, _none)(reader, view):
                    yield f"{what} (reader {reader.rank})", after

    def _fault_break(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        """Messages on their way are lost. Prefill notices when it sends, decode does not."""
        connection = reader.connection + 1
        yield "the connection breaks", reader._replace(up=(), down=(), connection=connection)
        up = (pv.ConnectionLost((reader.rank, reader.connection)),)
        down = (dv.PeerLost(reader.seats[-1].peer or INSTANCES[0]),)
        after = reader._replace(up=up, down=down, connection=connection)
        yield "the connection breaks, and both notice", after

    def _fault_double(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        """A message is handled, and comes once more behind the others."""
        if reader.down and not isinstance(reader.down[0], dv.PeerLost):
            rest = (*reader.down[1:], reader.down[0])
            after = self.receive(reader._replace(down=rest), view, reader.down[0])
            yield f"decode gets {text(reader.down[0])}, and again", after

    def _fault_fail(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        for n, read in enumerate(reader.reads):
            if read.state == "running":
                landing = put(reader.reads, n, read._replace(state="landing"))
                after, event = reader._replace(reads=landing), dv.ReadFailed(read.action.read)
                yield f"read {event.read} fails", self.handle(after, view, event)

    def _fault_hang(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        for n, read in enumerate(reader.reads):
            if read.state == "running":
                reads = put(reader.reads, n, read._replace(state="hanging"))
                yield f"read {read.action.read} hangs", reader._replace(reads=reads)

    def _fault_close(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        if reader.seats[-1].peer and reader.seats[-1].reason is None:
            yield from self._close_gate(reader, view, "aborted")

    def _fault_die(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        yield "it dies", reader._replace(alive=False, down=(), reads=(), copies=(), pool=())

    def check_end(self, reader: Reader) -> None:
        if not reader.alive:
            return
        left, rank = self.machine.left[reader.machine], reader.rank
        require(reader.seats[-1].closed, f"reader {rank} is never done: {reader.seats}")
        require(not left and not reader.reads, f"left on decode {rank}: {left}, {reader.reads}")


def _none(reader: Reader, view: View) -> tuple[()]:
    return ()


class Table:
    """Values by number, and numbers by value."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def number(self, value: Hashable) -> int:
        found = self._numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


class Fact(NamedTuple):
    """Of a reader, what the world asks for. `rest`, `again`: it without its first message to
    prefill, and with that one once more behind the others."""

    link: tuple[int, int] | None
    head: Any
    rest: int
    again: int
    cold: bool
    over: bool  # the gate of its first request is closed
    failed: tuple[bool, ...]


class World:
    """Both sides. What one side can do is worked out once for each of its states."""

    def __init__(
        self,
        case: Case,
        prefill_rooms: type[Any] = Prefill,
        decode_rooms: type[Any] = decode.Rooms,
    ) -> None:
        self.case = case
        self.prefill = PrefillSide(case, prefill_rooms)
        self.decode = DecodeSide(case, decode_rooms)
        self.fronts, self.readers, self.views = Table(), Table(), Table()
        for name in [name for name in dir(self) if name.startswith("_of_")]:
            setattr(self, name, cache(getattr(self, name)))

    def start(self) -> State:
        readers = [self.readers.number(self.decode.start(rank)) for rank in range(2)]
        return self.fronts.number(self.prefill.start()), *readers

    def steps(self, state: State, disturbed: bool) -> list[tuple[str, State]]:
        """What can happen next by itself: time passes only if nothing else does."""
        front, *readers = state
        facts = [self._of_reader(number) for number in readers]
        require(disturbed or not any(f.cold for f in facts), "cold, and nothing was disturbed")
        found = []
        links = (facts[0].link, facts[1].link)
        for what, after, outs in self._of_front_steps(front, links):
            found.append((what, self._joined(after, readers, outs)))
        for i, fact in enumerate(facts):
            if fact.head is not None:
                what, after, outs = self._of_front_gets(front, links, fact.head)
                found.append((what, self._joined(after, put(readers, i, fact.rest), outs)))
            view = self._of_view(front, i)
            for what, after in self._of_reader_steps(readers[i], view, facts[1 - i].failed):
                found.append((what, (*state[: i + 1], after, *state[i + 2 :])))
        if not found and (later := self._tick(state)) != state:
            found.append(("time passes", later))
        elif not found:
            self._check_end(state)
        return found

    def disturbances(self, state: State) -> list[tuple[str, State]]:
        front, *readers = state
        facts = [self._of_reader(number) for number in readers]
        found, links = [], (facts[0].link, facts[1].link)
        if "early" in self.case.faults:
            found.append(("FAULT: time passes early", self._tick(state)))
        for what, after, outs in self._of_front_faults(front, links):
            found.append(("FAULT: " + what, self._joined(after, readers, outs)))
        for i, fact in enumerate(facts):
            if isinstance(fact.head, pv.Received) and "double" in self.case.faults:
                what, after, outs = self._of_front_gets(front, links, fact.head)
                after = self._joined(after, put(readers, i, fact.again), outs)
                found.append((f"FAULT: {what}, and again", after))
            view = self._of_view(front, i)
            for what, after in self._of_reader_faults(readers[i], view):
                found.append(("FAULT: " + what, (*state[: i + 1], after, *state[i + 2 :])))
        again = self.prefill.again(self.fronts.values[front])
        if self._may_come_again(facts) and again != self.fronts.values[front]:
            found.append(("FAULT: the number comes again", (self.fronts.number(again), *readers)))
        if "restart" in self.case.faults and not self.fronts.values[front].restarted:
            found.append(("FAULT: prefill starts anew", self._restart(state)))
        return found

    def _may_come_again(self, facts: Sequence[Fact]) -> bool:
        over = all(fact.over for fact in facts)
        return "anyhow" in self.case.faults or ("again" in self.case.faults and over)

    def _joined(self, front: int, readers: Sequence[int], outs: Outs) -> State:
        if outs == NOTHING:
            return front, *readers
        return front, *(self._of_sending(r, out) for r, out in zip(readers, outs, strict=True))

    def _tick(self, state: State) -> State:
        front, *readers = state
        links = tuple(self._of_reader(number).link for number in readers)
        after, outs = self._of_front_tick(front, links)
        readers = [self._of_reader_tick(r, self._of_view(front, i)) for i, r in enumerate(readers)]
        return self._joined(after, readers, outs)

    def _restart(self, state: State) -> State:
        front = self.prefill.restarted(self.fronts.values[state[0]])
        readers = [self.readers.values[number] for number in state[1:]]
        readers = [r._replace(up=(), connection=r.connection + 1) for r in readers]
        return self.fronts.number(front), *map(self.readers.number, readers)

    def _check_end(self, state: State) -> None:
        """Of a world in which nothing can happen any more, and time changes nothing."""
        self.prefill.check_end(self.fronts.values[state[0]])
        for number in state[1:]:
            self.decode.check_end(self.readers.values[number])

    # -- answers that are worked out once

    def _of_reader(self, number: int) -> Fact:
        reader = self.readers.values[number]
        head, rest = (*reader.up[:1], None)[0], reader._replace(up=reader.up[1:])
        return Fact(
            reader.link, head, self.readers.number(rest),
            self.readers.number(rest._replace(up=(*rest.up, head))),
            any(seat.verdict == "cold" for seat in reader.seats),
            reader.seats[0].reason is not None or not reader.alive,
            tuple(bool(seat.reason) for seat in reader.seats),
        )  # fmt: skip

    def _of_view(self, front: int, rank: int) -> int:
        return self.views.number(self.prefill.view(self.fronts.values[front], rank))

    def _of_sending(self, reader: int, out: tuple[Any, ...]) -> int:
        after = self.readers.values[reader]
        for message in out:
            if not isinstance(message, pv.ConnectionLost):
                after = after._replace(down=(*after.down, message))
            elif message not in after.up:
                after = after._replace(up=(*after.up, message))
        return self.readers.number(after)

    def _of_front_steps(self, front: int, links: Any) -> list[Any]:
        return self._moves(self.prefill.steps(self.fronts.values[front], links))

    def _of_front_faults(self, front: int, links: Any) -> list[Any]:
        return self._moves(self.prefill.faults(self.fronts.values[front], links))

    def _moves(self, moves: Iterator[tuple[str, Moved]]) -> list[Any]:
        return [(what, self.fronts.number(after), outs) for what, (after, outs) in moves]

    def _of_front_gets(self, front: int, links: Any, event: Any) -> tuple[str, int, Outs]:
        after, outs = self.prefill.handle(self.fronts.values[front], links, event)
        what = f"prefill gets {text(getattr(event, 'message', event))}"
        return what, self.fronts.number(after), outs

    def _of_front_tick(self, front: int, links: Any) -> tuple[int, Outs]:
        after, outs = self.prefill.handle(self.fronts.values[front], links, pv.Tick(), 1.0)
        return self.fronts.number(after), outs

    def _of_reader_tick(self, number: int, view: int) -> int:
        reader = self.readers.values[number]
        if not reader.alive:
            return number
        after = self.decode.handle(reader, self.views.values[view], dv.Tick(), 1.0)
        return self.readers.number(after)

    def _of_reader_steps(self, number: int, view: int, others: Any) -> list[tuple[str, int]]:
        steps = self.decode.steps(self.readers.values[number], self.views.values[view], others)
        return [(what, self.readers.number(after)) for what, after in steps]

    def _of_reader_faults(self, number: int, view: int) -> list[tuple[str, int]]:
        faults = self.decode.faults(self.readers.values[number], self.views.values[view])
        return [(what, self.readers.number(after)) for what, after in faults]


class Report(NamedTuple):
    worlds: tuple[int, ...]  # by number of disturbances
    steps: int
    seconds: float
    violation: str = ""
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{n:3}  {what}" for n, what in enumerate(self.path, 1)]
        return "\n".join([*lines, f"VIOLATION: {self.violation}"])


def search(new_world: Callable[[], World], disturbances: int, one_in: int = 1) -> Report:
    """All worlds that are reached with so many disturbances at most. `one_in`: of the worlds that
    a disturbance leads to at once, one in so many is gone on from."""
    report = Search(new_world(), disturbances, one_in).run()
    if not report.violation:
        return report
    return Search(new_world(), disturbances, one_in, ways={}).run()  # with the way to it


class Search:
    def __init__(
        self, world: World, disturbances: int, one_in: int, ways: dict[Any, Any] | None = None
    ) -> None:
        self._world, self._one_in, self._ways = world, one_in, ways
        self._seen: list[set[State]] = [set() for _ in range(disturbances + 1)]
        self._steps = 0

    def run(self) -> Report:
        began, problem, path = time.perf_counter(), "", ()
        try:
            self._layers()
        except Violation as violation:
            problem, path = str(violation), self._way()
        worlds = tuple(map(len, self._seen))
        return Report(worlds, self._steps, time.perf_counter() - began, problem, path)

    def _layers(self) -> None:
        later = {self._world.start()}
        for used, seen in enumerate(self._seen):
            fresh = [state for state in later if not self._is_seen(state)]
            seen.update(fresh)
            queue, later = deque(fresh), set()
            while queue:
                self._at = state = queue.popleft()
                for what, after in self._world.steps(state, used > 0):
                    self._steps += 1
                    if not self._is_seen(after):
                        seen.add(after)
                        queue.append(after)
                        self._note(state, what, after)
                if used + 1 < len(self._seen):
                    for what, after in self._world.disturbances(state):
                        self._steps += 1
                        chosen = hash(after) % self._one_in == 0
                        if chosen and after not in later and not self._is_seen(after):
                            later.add(after)
                            self._note(state, what, after)

    def _is_seen(self, state: State) -> bool:
        return any(state in seen for seen in self._seen)

    def _note(self, before: State, what: str, after: State) -> None:
        if self._ways is not None:
            self._ways.setdefault(after, (before, what))

    def _way(self) -> tuple[str, ...]:
        state, found = self._at, []
        while self._ways and state in self._ways:
            state, what = self._ways[state]
            found.append(what)
        return tuple(reversed(found))
