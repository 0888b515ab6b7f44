"""Which requests are warm whatever goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import World


def is_spared(world: World, request: Request) -> bool:
    """Whether it has to be warm: its number can be sent, no fault is on a server of its own, both
    have the usual patience, and at both there are slots for it, whatever ranks of servers with a
    fault hold.

    A late request comes when all is over. Left out besides (SlotPool.available_for):

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
    hit = {fault.where[0] for fault in world.spec.faults if not fault.spares(request)}
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
