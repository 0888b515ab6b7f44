"""The requests that must be warm whatever goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import World


def is_spared(world: World, request: Request) -> bool:
    """Return whether it must be warm: its number can be sent, neither of its servers has a fault,
    both have the usual patience, and both have slots for it, whatever the ranks of servers with a
    fault hold.

    A late request comes when all is over. Also left out (SlotPool.available_for):

    * a server with fewer than eight slots, or with more living ranks that may want one than it has
      slots, or than a quarter of these if ranks have a fault;
    * as many ranks with a fault as there are slots, if they were served before: each may have been
      served while the others held slots, and then cannot be told from the living;
    * a request whose last message is older than the last slot that a rank with a fault got, or
      newer by less than `Times.unsure`. Its ranks are refused what silent, dead ranks are refused,
      until they send something, or for `slot_aside`.
    """
    own = (request.prefill, request.decode)
    if not 0 <= request.number < 1 << 64:
        return False
    hit = {fault.where[0] for fault in world.spec.faults if not fault.spares(request)}
    hit |= {one.decode for one in world.spec.requests if one.holds_slots and not request.late}
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
