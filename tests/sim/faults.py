"""The faults, one class per kind. Other files name a kind only where a scene uses it.

To add a kind, add a class here. It has a weight `often` for random draws, and methods that draw
it, begin it, list its variants for the small world of every.py, and return which requests it
spares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from msgspec.structs import replace

from sglang_mixkv.channel.messages import (
    PROTOCOL,
    Ack,
    Announced,
    Fail,
    Message,
    Open,
    Ready,
    decode,
    encode,
)
from tests.sim.network import READ_FAULTS, Link

if TYPE_CHECKING:
    import random

    from tests.sim.decode import DecodeRank
    from tests.sim.process import Process
    from tests.sim.sglang import Group
    from tests.sim.spec import Request, Where
    from tests.sim.world import World

LASTS = 10.0  # seconds for which a fault waits for an operation that it can hit
STOPS = "", "", "sampled", "emitted"  # the step that a stop interrupts, "" for any


class Occasion(NamedTuple):
    """The inputs from which a fault is drawn: a time, and the two ranks of a request.

    `one`: either of the two ranks. `name`: the name by which decode addresses the prefill server.
    """

    rng: random.Random
    time: float
    prefill: Where
    decode: Where
    one: Where
    name: str


KINDS: dict[type[Fault], int] = {}
"""All kinds of faults, with the weight of each in a draw."""


@dataclass(frozen=True)
class Fault:
    """A fault that begins at a `time`, on the rank `where`, and lasts for `seconds`.

    `peer`: the rank at the other end, if any. `mode`: the variant of the fault.
    """

    time: float
    where: Where
    seconds: float = 0.0
    peer: Where | None = None
    mode: str = ""
    count: int = 0

    halts: ClassVar = False  # the channel thread may be late, so SGLang's scheduler may decide
    holds_slots: ClassVar = False  # the rank may hold slots of other ranks for a while
    hides_time: ClassVar = False  # the rank cannot notice that its peers' slots have expired
    keeps_rows: ClassVar = False  # clearing rows may fail, and then the request fails

    def __init_subclass__(cls, often: int = 0) -> None:
        KINDS[cls] = often

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        raise NotImplementedError

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        """Yield the faults that every.py tries between these two ranks."""
        return ()

    def begin(self, world: World) -> None:
        raise NotImplementedError

    def spares(self, request: Request) -> bool:
        """Return whether the request comes after the fault has ended.

        Any other request is spared only if it is on other servers (spared.py).
        """
        return request.late

    def rank(self, world: World) -> Process:
        return world.places[self.where].process


class Stop(Fault, often=5):
    """Stops all threads of a process. `mode`: the step that the stop interrupts."""

    halts = holds_slots = True

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        low, high = at.rng.choice(((0.005, 0.1), (0.5, 4.9), (5, 20), (55, 80)))
        return cls(at.time, at.one, at.rng.uniform(low, high), None, at.rng.choice(STOPS))

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        yield from (cls(0, where, 0.7) for where in (prefill, reader))
        yield from (cls(0, reader, 61.0, None, mode) for mode in dict.fromkeys(STOPS))

    def begin(self, world: World) -> None:
        self.rank(world).stop(self.mode, self.seconds)


class Suspend(Stop, often=1):
    """Suspends a rank's host or virtual machine, so that its clock also stands still.

    A host suspended for longer than its peers retain slots reads bytes of other requests.
    """

    hides_time = True

    def begin(self, world: World) -> None:
        self.rank(world).stop(self.mode, self.seconds, suspended=True)


class Kill(Fault, often=4):
    """Kills a whole server, since SGLang's watchdog ends the other ranks.

    `seconds`: the time until the restart, 0 for no restart. `mode`: with "power", no peer gets a
    TCP reset.
    """

    holds_slots = True

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        seconds = at.rng.choice((0, 0.5, 10)) * at.rng.random()
        return cls(at.time, at.one, seconds, None, at.rng.choice(("", "", "power")))

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        return (cls(0, where, 0.1) for where in (prefill, reader))

    def begin(self, world: World) -> None:
        group = world.groups[self.where[0]]
        if not group.is_alive:
            return
        for place in group.places:
            place.process.kill()
        for link in list(world.connections.values()):
            if not link.reader.alive or link.place.server is group.server:
                link.end(silent=self.mode == "power" or world.clock.rng.random() < 0.2)
        self._others_notice(world, group)
        if self.seconds:
            world.clock.after(self.seconds, self._restart, world, group)

    def _others_notice(self, world: World, group: Group) -> None:
        number, rng = group.server.number, world.clock.rng
        group.epoch += 1
        for life in world.lives.values():
            request = life.request
            if life.begun is None:
                continue
            if request.prefill == number and not life.prefill_over:
                life.prefill_over = True
                other = world.groups[request.decode]
                world.clock.after((1 - rng.random()) * 20, other.waited, request, "prefill is dead")
            if request.decode == number and not life.decode_over:
                life.outcome, life.by = "lost", "stock"
                other = world.groups[request.prefill]
                world.clock.after(rng.random() * 5, other.waited, request, "decode is dead")
        for place in world.places.values():
            # the heartbeat of a decode server notices a dead prefill server
            if place.server.side == "decode" != group.server.side:
                world.clock.after((1 - rng.random()) * 20, place.process.miss, number)

    def _restart(self, world: World, group: Group) -> None:
        world.note_fault(f"server {group.server.number} restarts")
        for place in group.places:
            world.start(place)


class OfLinks(Fault):
    """A fault of a reader's connections to a prefill rank."""

    def links(self, world: World) -> list[Link]:
        """Return the links, including those to former instances at this address."""
        reader, place = self.rank(world), world.places[self.peer]
        peer = place.process.instance
        if reader.alive and place.process.alive and peer not in reader.dialed:
            reader.dialed.add(peer)
            reader.links.add(Link(reader, peer))
        return [link for link in reader.links.of.values() if link.place is place and reader.alive]


class Break(OfLinks, often=3):
    """Breaks connections.

    `mode`: "silent" if neither side notices at once; "overtaken" if the last messages of a
    connection reach prefill up to `seconds` later, after messages of the next connection.
    """

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        mode = at.rng.choice(("", "silent", "overtaken"))
        return cls(at.time, at.decode, at.rng.choice((0.005, 0.1, 1.0)), at.prefill, mode)

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        return (cls(0, reader, 0.1, prefill, mode) for mode in ("", "silent", "overtaken"))

    def begin(self, world: World) -> None:
        for link in self.links(world):
            if self.mode == "overtaken":
                link.overtaken[link.epoch] = self.seconds
            link.end(silent=self.mode == "silent")


class Reads(Fault, often=4):
    """Hits the next `count` reads of a rank, from one peer or from all. `mode`: how they end."""

    holds_slots = True

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        mode, count = at.rng.choice(READ_FAULTS), at.rng.randint(1, 3)
        return cls(at.time, at.decode, 0.0, at.prefill, mode, count)

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        return (cls(0, reader, 0.0, prefill, mode, 1) for mode in READ_FAULTS)

    def begin(self, world: World) -> None:
        rank = self.rank(world)
        peer = world.places[self.peer].process.instance if self.peer else None
        if self.mode == "stuck":
            rank.stuck = self.seconds
        rank.read_faults.append(entry := [self.mode, peer, self.count])
        world.clock.after(self.seconds or LASTS, entry.__setitem__, 2, 0)


class Cut(OfLinks, often=2):
    """Blocks connections for a while."""

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        seconds = at.rng.choice((0.1, 1, 8)) * at.rng.random()
        return cls(at.time, at.decode, seconds, at.prefill)

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        return (cls(0, reader, seconds, prefill) for seconds in (1.0, 6.0))

    def begin(self, world: World) -> None:
        for link in self.links(world):
            link.cut(self.seconds)


class Slow(OfLinks, often=2):
    """Delays messages for a while."""

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        seconds = at.rng.choice((0.1, 1, 8)) * at.rng.random()
        return cls(at.time, at.decode, seconds, at.prefill)

    def begin(self, world: World) -> None:
        slow = world.clock.rng.choice((0.01, 0.1, 5.0))
        for link in self.links(world):
            link.slow, link.slow_until = slow, world.clock.now + self.seconds


class Double(OfLinks, often=2):
    """Delivers `count` messages twice."""

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        return cls(at.time, at.decode, 0.0, at.prefill, "", at.rng.randint(1, 8))

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        yield cls(0, reader, 0.0, prefill, "", 1)

    def begin(self, world: World) -> None:
        for link in self.links(world):
            link.doubles += self.count
            world.clock.after(LASTS, setattr, link, "doubles", 0)


class Error(Fault, often=1):
    """Makes the next `count` copies or actions of a rank raise.

    `mode`: the kind of copy or action. Only the rows of a cold room are cleared, so "clear" also
    makes unpacking fail.
    """

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        kinds = (
            ("pack", at.prefill),
            ("unpack", at.decode),
            ("clear", at.decode),
            ("action", at.one),
        )
        mode, where = at.rng.choice(kinds)
        return cls(at.time, where, 0.0, None, mode, 1)

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        yield from (cls(0, where, 0.0, None, "action", 1) for where in (prefill, reader))
        yield from (cls(0, reader, 0.0, None, mode, 1) for mode in ("unpack", "clear"))

    @property
    def keeps_rows(self) -> bool:
        return self.mode in ("clear", "action")

    def begin(self, world: World) -> None:
        errors = self.rank(world).errors
        for kind in ("unpack", "clear") if self.mode == "clear" else (self.mode,):
            errors[kind] = errors.get(kind, 0) + self.count
        world.clock.after(LASTS, errors.clear)


class Hang(Fault, often=2):
    """Hangs the channel thread in an action. `mode`: the type of the action, "" for any."""

    halts = holds_slots = True

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        mode = at.rng.choice(("", "Send", "StartCopies" if at.one == at.prefill else "StartRead"))
        seconds = at.rng.choice((0.5, 6.0, 60.0)) * at.rng.random()
        return cls(at.time, at.one, seconds, None, mode)

    def begin(self, world: World) -> None:
        self.rank(world).hang(self.mode, self.seconds)


class Sluggish(Fault, often=1):
    """Slows a channel thread down: each step takes up to `count` ms."""

    halts = holds_slots = True

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        seconds, step = at.rng.choice((0.5, 3, 12)), at.rng.choice((5, 50, 400))
        return cls(at.time, at.one, seconds, None, "", step)

    def begin(self, world: World) -> None:
        self.rank(world).slow(self.seconds, self.count / 1000)


class Lasting(Fault):
    """A fault that still lasts when late requests come."""

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        return cls(at.time, at.one)

    def spares(self, request: Request) -> bool:
        return request.late and self.where[0] not in (request.prefill, request.decode)


class Broken(Lasting, often=1):
    """Ends the channel thread by an exception."""

    halts = True

    def begin(self, world: World) -> None:
        self.rank(world).break_()


class Drop(Fault, often=1):
    """Drops a prefill server that is alive. `mode`: the server's name that decode uses."""

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        return cls(at.time, at.decode, 0.0, at.prefill, at.name)

    def begin(self, world: World) -> None:
        reader: DecodeRank = self.rank(world)
        peer = world.places[self.peer].process.instance + self.mode.encode()
        if reader.alive and peer in reader.dialed:
            self.befall(world, reader, peer)

    def befall(self, world: World, reader: DecodeRank, peer: bytes) -> None:
        reader.give_up(peer)


class Relink(Drop, often=1):
    """Replaces a peer's link."""

    def befall(self, world: World, reader: DecodeRank, peer: bytes) -> None:
        if world.places[self.peer].process.alive:
            reader.worker.add(Link(reader, peer))


class Device(Lasting, often=1):
    """Makes a rank's GPU fail, if it has one."""

    keeps_rows = True

    def begin(self, world: World) -> None:
        if (device := self.rank(world).device) is not None:
            device.failed = True


class Restore(Lasting, often=1):
    """Restores a rank from a snapshot: all reads from it and by it fail, soon or much later."""

    holds_slots = True

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        return (cls(0, where) for where in (prefill, reader))

    def begin(self, world: World) -> None:
        self.rank(world).restore()


class Lies(Fault, often=1):
    """Makes a prefill rank send a reader `count` false messages.

    Among the true READYs, the rank sends some that are duplicated, out of order, of other
    generations or with other stamps.
    """

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        seconds, count = at.rng.random(), at.rng.randint(1, 20)
        return cls(at.time, at.prefill, seconds, at.decode, "", count)

    def begin(self, world: World) -> None:
        world.liars.add(self.where[0])
        for _ in range(self.count):
            world.clock.after(world.clock.rng.random() * self.seconds, self._lie, world)

    def _lie(self, world: World) -> None:
        place, rng = world.places[self.where], world.clock.rng
        reader = world.places[self.peer].process
        links = [link for link in reader.links.of.values() if link.place is place]
        if not (reader.alive and place.process.alive and links):
            return
        link = rng.choice(links)
        if link.connection:
            link.to_decode(encode(self._message(rng, link, reader)))

    def _message(self, rng: random.Random, link: Link, reader: DecodeRank) -> Message:
        rooms = list(reader.judge.requests.values())
        one = rng.choice(rooms).opened if rooms else None
        number = abs(one.bootstrap_room) & ((1 << 63) - 1) if one else 1000
        generation = one.generation if one and rng.random() < 0.9 else rng.randint(1, 1 << 40)
        heard = link.heard
        if heard and rng.random() < 0.5:
            again = rng.choice(heard)
            kept = again.generation if rng.random() < 0.5 else generation
            return replace(again, generation=kept, segment=again.segment + rng.randint(0, 1))
        if rng.random() < 0.1:
            code = rng.choice(("aborted", "nonsense", "restarted"))
            return Fail(number, generation, code, "a lie")
        slots = [
            Announced(rng.randint(0, 20), rng.randint(1, 1 << 50), rng.choice((1, 2, 3, 1 << 30)))
            for _ in range(rng.randint(0, 4))
        ]
        first = rng.choice((0, 0, 1, 8, 1 << 39))
        segment = rng.choice((0, 0, 1, 2, 1 << 30))
        return Ready(number, generation, segment, first, tuple(slots), rng.random() < 0.3)


class Stranger(Fault, often=1):
    """Sends a prefill rank `count` messages of a reader that belongs to no server.

    The stranger never acknowledges a READY. It accepts messages unless the `mode` is "gone". With
    "spy" it uses the room numbers and readers of real requests, which may go cold because of that.
    """

    holds_slots = True

    @classmethod
    def draw(cls, at: Occasion) -> Self:
        mode, count = at.rng.choice(("", "gone", "spy")), at.rng.randint(1, 40)
        return cls(at.time, at.prefill, at.rng.choice((0.05, 0.5, 3)), None, mode, count)

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        yield cls(0, prefill, 0.01, None, "", 3)

    def begin(self, world: World) -> None:
        if self.mode != "gone":
            world.unnoticed[b"stranger"] = world.clock.now + 100
        for _ in range(self.count):
            world.clock.after(world.clock.rng.random() * self.seconds, self._speak, world)

    def spares(self, request: Request) -> bool:
        return super().spares(request) and self.mode != "spy"

    def _speak(self, world: World) -> None:
        process = self.rank(world)
        message = decode(encode(self._message(world, process)))
        received = process.machine.received, (b"stranger", message)
        process.step("stranger", process.handle, (received,))

    def _message(self, world: World, process: Process) -> Message:
        rng = world.clock.rng
        generation, room = rng.randint(1, 1 << 62), (1 << 40) + rng.randint(0, 3)
        name = b"evil%04d" % rng.randint(0, 3)
        if self.mode == "spy":
            room = abs(rng.choice(world.spec.requests).number) & ((1 << 63) - 1)
            name = rng.choice([name, *(one.instance for one in world.processes)])
        if rng.random() < 0.2:
            some = [(rng.randint(0, 40), rng.randint(1, 1 << 50)) for _ in range(rng.randint(1, 9))]
            return Ack(tuple(some))
        if rng.random() < 0.1:
            return Fail(room, generation, "closed", "")
        own = process.place.layout.heads
        start, stop = sorted(rng.choices(range(own.start, own.stop + 1), k=2))
        heads = rng.choice(((start, stop), (start, stop), (0, 1 << 16)))
        sizes = 1, 80, process.place.slot_bytes, 1 << 40
        return Open(
            PROTOCOL[1], room, generation, rng.choice((process.instance, b"another_")), name,
            rng.choice((1, 1, 2, 5, 1 << 16)), heads, rng.choice((0, 1, 1 << 40)),
            rng.choice(sizes),
        )  # fmt: skip


class Abort(Fault):
    """Aborts all requests of a server. `mode`: "both" if the other side aborts them too."""

    @classmethod
    def small(cls, prefill: Where, reader: Where) -> Iterable[Fault]:
        return (cls(0, where) for where in (prefill, reader))

    def begin(self, world: World) -> None:
        side = self.rank(world).place.server.side
        for life in world.lives.values():
            request = life.request
            if life.begun is not None and self.where[0] in (request.prefill, request.decode):
                world.abort(request, side, self.mode == "both")
