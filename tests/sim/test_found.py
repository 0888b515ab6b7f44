"""What the simulator has found in the machines, each in its smallest form."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_mixkv.channel.messages import Ack, Announced, Fail, Open, Ready
from sglang_mixkv.channel.slots import RoundRobin, SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as dev
from sglang_mixkv.decode.machine import Machine as DecodeMachine
from sglang_mixkv.prefill import events as pev
from sglang_mixkv.prefill.machine import Machine as PrefillMachine

ONE, TWO, READER = b"prefill1", b"prefill2", b"decode01"


class Driven:
    """A machine that is asked for actions after each event. Copies are listed one by one."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def handle(self, event: Any, now: float) -> list[Any]:
        self.machine.handle(event, now)
        found = []
        for action in self.machine.actions():
            found += action.jobs if isinstance(action, pev.Pack | dev.Copy) else (action,)
        return found


def new_prefill(slots: int = 4) -> Driven:
    pool = SlotPool(slots, Times())
    return Driven(PrefillMachine(ONE, range(1), lambda heads, size: 4, pool, Times()))


def new_decode(slots: int = 2) -> Driven:
    return Driven(DecodeMachine(READER, SlotPool(slots, Times()), 1 << 10, Times()))


def open_(room: int, generation: int) -> pev.Received:
    return pev.Received(b"c", Open(1, room, generation, ONE, READER, 1, (0, 1), 0, 1 << 10))


def opened(generation: int, peer: bytes = ONE) -> dev.OpenRoom:
    return dev.OpenRoom(generation, 7, (dev.Source(peer, range(1), 1, 4, 4),), 0, 16)


def ready(generation: int, segment: int, peer: bytes = ONE) -> dev.Received:
    stamp = 100 * generation + segment + 1
    announced = Announced(segment, stamp, 4)
    message = Ready(7, generation, segment, 4 * segment, (announced,), last=False)
    return dev.Received(peer, message)


def of(kind: type, actions: list) -> list:
    return [action for action in actions if isinstance(action, kind)]


def test_a_room_whose_reader_ended_first_does_not_wait_for_it() -> None:
    machine = new_prefill()
    machine.handle(open_(7, 1), 0.0)
    machine.handle(pev.Received(b"c", Fail(7, 1, "closed")), 0.0)
    assert of(pev.Settled, machine.handle(pev.Begin(1, 7), 0.1))


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("late", [0.1, 300.0])
def test_each_request_that_a_reader_ended_may_still_come(late: float, lost: bool) -> None:
    """Its OPEN of the same number is for the request behind all of them, however late they are."""
    machine = new_prefill()
    for generation in (1, 2):
        if not lost:
            machine.handle(open_(7, generation), 0.0)
        reader = READER if lost else None
        machine.handle(pev.Received(b"c", Fail(7, generation, "closed", reader=reader)), 0.0)
    machine.handle(open_(7, 3), 0.0)
    for second in range(int(late)):
        machine.handle(pev.Tick(), float(second))
    for use in (1, 2):
        machine.handle(pev.Begin(use, 7), late)
        assert not of(pev.PackJob, machine.handle(pev.AddChunk(use, 0, 4, True, use), late))
        machine.handle(pev.End(use), late)
    machine.handle(pev.Begin(3, 7), late)
    (pack,) = of(pev.PackJob, machine.handle(pev.AddChunk(3, 0, 4, True, 3), late))
    assert pack.handle == 3


def test_all_readers_that_opened_have_ended_and_another_is_for_the_next_request() -> None:
    """A decode server was started again, and uses the number of its former life."""
    machine = new_prefill()
    machine.handle(open_(7, 1), 0.0)
    machine.handle(pev.ConnectionLost(b"c"), 0.1)
    machine.handle(pev.Begin(1, 7), 0.2)
    opened = Open(1, 7, 9, ONE, b"decode02", 1, (0, 1), 0, 1 << 10)
    machine.handle(pev.Received(b"d", opened), 0.3)
    assert not of(pev.PackJob, machine.handle(pev.AddChunk(1, 0, 4, True, 1), 0.4))
    machine.handle(pev.Begin(2, 7), 0.5)
    (pack,) = of(pev.PackJob, machine.handle(pev.AddChunk(2, 0, 4, True, 2), 0.6))
    assert pack.handle == 2


def test_a_doubled_ready_is_not_acknowledged_while_the_first_is_read() -> None:
    machine = new_decode()
    machine.handle(opened(1), 0.0)
    assert of(dev.StartRead, machine.handle(ready(1, 0), 0.0))
    machine.handle(dev.CloseRoom(1), 0.1)
    assert not of(dev.Send, machine.handle(ready(1, 0), 0.2))
    acks = of(dev.Send, machine.handle(dev.ReadEnded(1), 0.3))
    assert [send.message for send in acks] == [Ack(((0, 101),))]


def test_owners_take_turns_from_one_free_slot_to_the_next() -> None:
    turns, pool = RoundRobin[str](), SlotPool(4, Times())
    for number in range(3):
        for owner in "ab":
            turns.add(owner, owner + str(number))
    served, slot = "", None
    for _ in range(6):
        ((item, slot),) = turns.take(pool, 0.0, 1)
        served += item[0]
        pool.free(slot)
    assert served == "ababab"
