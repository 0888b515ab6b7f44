"""What goes wrong, and which requests are warm all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.network import Link

if TYPE_CHECKING:
    from tests.sim.sglang import Group
    from tests.sim.spec import Fault, Request
    from tests.sim.world import World


LASTS = 10.0  # seconds that a fault waits for what it befalls


def begin(world: World, fault: Fault) -> None:
    world.note_fault(str(fault))
    rank, rng, after = world.places[fault.where].process, world.clock.rng, world.clock.after
    match fault.kind:
        case "stop":
            rank.stop(fault.mode, fault.seconds)
        case "kill":
            _kill(world, rank.group, fault.seconds)
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


def _kill(world: World, group: Group, seconds: float) -> None:
    """The whole server: SGLang's watchdog ends the other ranks."""
    if not group.is_alive:
        return
    for place in group.places:
        place.process.kill()
    for link in list(world.connections.values()):
        if not link.reader.alive or link.place.server is group.server:
            link.end(silent=world.clock.rng.random() < 0.2)
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
    """Whether it has to be warm. No fault is on a server of its own, and those of its servers have
    a slot for each rank that may want one, although ranks of a server with a fault hold theirs: two
    of these have three quarters, and each other has one. A late request comes when all is over."""
    hit = set() if request.late else {fault.where[0] for fault in world.spec.faults}
    for here in (world.spec.servers[number] for number in (request.prefill, request.decode)):
        holders = {
            one.number: max(1, one.tp // here.tp)
            for one in world.spec.servers if one.side != here.side
        }  # fmt: skip
        dead = sum(holders.get(number, 0) for number in hit)
        few = not dead or (here.slots >= 8 and dead < 2 + here.slots // 4)
        if here.number in hit or not few or sum(holders.values()) > here.slots:
            return False
    return True
