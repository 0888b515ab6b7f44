"""What goes wrong, and which requests are warm all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sglang_mixkv.channel.messages import Announced, Fail, Message, Ready, encode
from tests.sim.network import Link

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.sglang import Group
    from tests.sim.spec import Fault, Request
    from tests.sim.world import Place, World


LASTS = 10.0  # seconds that a fault waits for what it befalls


def begin(world: World, fault: Fault) -> None:
    world.note_fault(str(fault))
    rank, rng, after = world.places[fault.where].process, world.clock.rng, world.clock.after
    match fault.kind:
        case "stop":
            rank.stop(fault.mode, fault.seconds)
        case "kill":
            _kill(world, rank.group, fault.seconds, fault.mode == "power")
        case "hang":
            rank.hang(fault.mode, fault.seconds)
        case "broken":
            rank.break_()
        case "device":
            if rank.device is not None:
                rank.device.failed = True
        case "drop" | "relink":
            _relink(rank, world.places[fault.peer], fault)
        case "lies":
            Liar(world, fault)
        case "reads":
            peer = world.places[fault.peer].process.instance if fault.peer else None
            if fault.mode == "stuck":
                rank.stuck = fault.seconds
            rank.read_faults.append(entry := [fault.mode, peer, fault.count])
            after(fault.seconds or LASTS, entry.__setitem__, 2, 0)
        case "error":
            for kind in ("unpack", "clear") if fault.mode == "clear" else (fault.mode,):
                rank.errors[kind] = rank.errors.get(kind, 0) + fault.count
            after(LASTS, rank.errors.clear)  # "clear": a room whose rows are cleared is cold
        case "abort":  # all requests of the server
            for life in world.lives.values():
                request = life.request
                if life.begun is not None and fault.where[0] in (request.prefill, request.decode):
                    world.abort(request, rank.place.server.side, fault.mode == "told")
        case _:
            slow = rng.choice((0.01, 0.1, 5.0)) if fault.kind == "slow" else 0.0
            for link in _links(world, fault):
                _befall(link, fault, slow)


def _befall(link: Link, fault: Fault, slow: float) -> None:
    match fault.kind:
        case "break":
            link.end(silent=fault.mode == "silent")
        case "cut":
            link.cut(fault.seconds)
        case "slow":
            link.slow, link.slow_until = slow, link.clock.now + fault.seconds
        case "double":
            link.doubles += fault.count
            link.clock.after(LASTS, setattr, link, "doubles", 0)


def _links(world: World, fault: Fault) -> list[Link]:
    """The reader's connections to this address, where former instances were, too."""
    reader, place = world.places[fault.where].process, world.places[fault.peer]
    peer = place.process.instance
    if reader.alive and place.process.alive and peer not in reader.dialed:
        reader.dialed.add(peer)
        reader.links.add(Link(reader, peer))
    return [link for link in reader.links.of.values() if link.place is place and reader.alive]


def _relink(reader: DecodeRank, place: Place, fault: Fault) -> None:
    """The server is given up though it is there; or a peer's link is replaced by another one."""
    peer = place.process.instance + fault.mode.encode()
    if not reader.alive or peer not in reader.dialed:
        return
    if fault.kind == "drop":
        reader.give_up(peer)
    elif place.process.alive:
        reader.worker.add(Link(reader, peer))


class Liar:
    """A prefill rank that sends a reader what it likes: READYs that are doubled, out of order, of
    other generations and with other stamps, in between its own."""

    def __init__(self, world: World, fault: Fault) -> None:
        self._world, self._rng = world, world.clock.rng
        self._place, self._reader = world.places[fault.where], world.places[fault.peer]
        world.liars.add(fault.where[0])
        for _ in range(fault.count):
            world.clock.after(self._rng.random() * fault.seconds, self._lie)

    def _lie(self) -> None:
        reader, rank = self._reader.process, self._place.process
        links = [link for link in reader.links.of.values() if link.place is self._place]
        if not (reader.alive and rank.alive and links):
            return
        link = self._rng.choice(links)
        if link.connection:
            link.to_decode(encode(self._message(link, reader)))

    def _message(self, link: Link, reader: DecodeRank) -> Message:
        rng, rooms = self._rng, list(reader.machine._rooms.values())
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


def _kill(world: World, group: Group, seconds: float, power: bool) -> None:
    """The whole server: SGLang's watchdog ends the other ranks. `power`: nobody hears of it."""
    if not group.is_alive:
        return
    for place in group.places:
        place.process.kill()
    for link in list(world.connections.values()):
        if not link.reader.alive or link.place.server is group.server:
            link.end(silent=power or world.clock.rng.random() < 0.2)
    _others_notice(world, group)
    if seconds:
        world.clock.after(seconds, _restart, world, group)


def _others_notice(world: World, group: Group) -> None:
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
        if place.server.side == "decode" != group.server.side:  # its heartbeat
            world.clock.after((1 - rng.random()) * 20, place.process.miss, number)


def _restart(world: World, group: Group) -> None:
    world.note_fault(f"server {group.server.number} is started again")
    for place in group.places:
        world.start(place)


def is_spared(world: World, request: Request) -> bool:
    """Whether it has to be warm: its number can be sent, no fault is on a server of its own, both
    have the usual patience, and at both there are slots for it, whatever ranks of servers with a
    fault hold.

    A late request comes when all is over. Left out besides (SlotPool.allowed):

    * a server of fewer than eight slots, or with more living ranks that may want one than there
      are, or than the last quarter of them where ranks have a fault;
    * as many ranks with a fault as there are slots, which were served before: each may have been
      when the others held slots already, and is not told from the living then;
    * a request whose last message is older than the last slot that a rank with a fault got, or
      newer by less than `Times.unsure`. What is kept from those that are gone and say nothing is
      kept from its ranks, until they say something, or for `slot_aside`.
    """
    own = (request.prefill, request.decode)
    if not 0 <= request.number < 1 << 64:
        return False
    hit = {fault.where[0] for fault in world.spec.faults}
    if request.late:
        lasting = {"broken", "device"}
        hit = {fault.where[0] for fault in world.spec.faults if fault.kind in lasting} & {*own}
    for here in (world.spec.servers[number] for number in own):
        holders = {
            one.number: max(1, one.tp // here.tp)
            for one in world.spec.servers if one.side != here.side
        }  # fmt: skip
        dead = hit & {*holders}
        living = sum(count for number, count in holders.items() if number not in dead)
        if here.patience < 1 or here.number in hit:
            return False
        if living > (here.slots // 4 if dead else here.slots):
            return False
        many = sum(holders[number] for number in dead) >= here.slots
        if many and world.checks.had_slots(here, dead):
            return False
        if dead and (here.slots < 8 or not world.checks.was_heard(here, request, dead)):
            return False
    return True
