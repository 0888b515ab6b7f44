"""The requests that must be warm in spite of the faults of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import World


def is_spared(world: World, request: Request) -> bool:
    """Return whether a request must be warm.

    Its room number must be encodable, and neither of its servers may have a fault or less patience
    than usual. A late request comes after all faults have ended. Both servers must also have slots
    for the request, no matter how many slots the ranks with a fault hold. `SlotPool.available_for`
    does not guarantee that in these cases:

    * The server has fewer than eight slots and some rank has a fault.
    * More healthy ranks may want a slot than the server has slots, or than a quarter of its slots
      if some rank has a fault.
    * More ranks have a fault than a quarter of the slots, and one of them was served before. Such a
      rank cannot be distinguished from a healthy one: a few may hold several slots each, and others
      then get the last quarter, one slot each.
    * The last message of one of the request's ranks is older than the last slot that a rank with a
      fault got, or less than `Times.unsure` newer. Such a rank is treated as silent until its next
      message, or for `slot_aside`.
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
        many = sum(holders[number] for number in dead) > here.slots // 4
        if many and world.checks.had_slots(here, dead):
            return False
        if dead and (here.slots < 8 or not world.checks.was_heard(here, request, dead)):
            return False
    return True
