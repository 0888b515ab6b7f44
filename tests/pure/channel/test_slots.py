"""The slot pool: each slot is free or has one owner, and owners share the slots."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from rig.channel.invariants import slot_violations

from sglang_mixkv.channel.slots import RoundRobin, SlotPool, share_of
from sglang_mixkv.channel.times import Times

TIMES = Times()


def take(pool: SlotPool, owner: object) -> int | None:
    """Take a slot as RoundRobin does, or return None if the owner has to wait."""
    return pool.allocate(owner) if pool.available_for(owner, len({*pool.held, owner})) else None


def drain(pool: SlotPool, owner: str) -> list[int]:
    taken = []
    while (slot := take(pool, owner)) is not None:
        taken.append(slot)
    return taken


def published(pool: SlotPool, now: float, *owners: str) -> list[int]:
    """Allocate and publish all slots that these owners may have."""
    found = [slot for owner in owners for slot in drain(pool, owner)]
    for slot in found:
        pool.publish(slot, 1 + slot, now)
    return found


# The new owner's last message (whether it was served, and when), and the slots that it then gets.
# 14 of 16 slots were published at 10.0.
SIGNS = [
    (None, 0.0, 0), (True, 9.9, 0), (False, 9.9, 0), (False, 10 + TIMES.unsure - 1e-3, 0),
    (True, 10.0, 1), (False, 10 + TIMES.unsure + 1e-3, 1),
]  # fmt: skip


@pytest.mark.parametrize("began", [0.0, -11.0])
@pytest.mark.parametrize(("served", "when", "given"), SIGNS)
def test_the_last_quarter_is_for_new_owners_that_are_alive(served, when, given, began):
    """The last quarter of the slots is for a new owner that is alive.

    An owner counts as alive if it sent a message long enough after the others' slots were
    published. The start of the caller's clock does not matter.
    """
    pool = SlotPool(16, TIMES)
    counts = [len(published(pool, began + 10.0, owner)) for owner in "abcdefgh"]
    assert counts == [8, 4, 1, 1, 0, 0, 0, 0]
    if served is not None:
        pool.sign("x", began + when, served)
    assert len(drain(pool, "x")) == given
    assert take(pool, "a") is None
    assert take(pool, "y") is None


def test_the_last_slots_are_for_owners_that_were_served():
    """The last sixteenth of the slots is for owners that have already read a slot.

    A few slots stay free even then, since an owner may have died after its last message.
    """
    pool, owners = SlotPool(64, TIMES), range(200)
    assert len(published(pool, 0.0, *owners)) == 56
    for owner in owners:
        pool.sign(owner, 1.0)
    assert len(published(pool, 1.0, *owners)) == 4
    for owner in owners:
        pool.sign(owner, 2.0, served=True)
    assert len(published(pool, 3.0, *owners)) == 3
    assert take(pool, 199) is None
    for owner in owners:
        pool.sign(owner, 4.0)
    assert len(published(pool, 5.0, *owners)) == 1, "the owners had been served"
    assert take(pool, 199) is None


def test_signs_of_life_are_kept_while_slots_are_published():
    pool = SlotPool(16, TIMES)
    for owner in range(100):
        pool.sign(owner, 1.0)
        pool.sign(owner, 1.0, served=True)
    assert pool._signs == ({}, {})
    for now in range(2, 9):
        slot = take(pool, "a")
        pool.publish(slot, 7, now)
        for owner in range(100 * now, 100 * now + 100):
            pool.sign(owner, now + 0.5)
            pool.sign(owner, now, served=True)
        assert [len(signs) for signs in pool._signs] == [100, 100]
        assert pool.acknowledge([(slot, 7)], now + 0.9) == []


def test_signs_older_than_all_published_slots_are_dropped():
    pool = SlotPool(16, TIMES)
    first, second = published(pool, 1.0, "a")[:2]
    pool.free(second)
    for owner, now in (("steady", 2.0), *((owner, 3.0) for owner in range(100))):
        pool.sign(owner, now, served=True)
    for slot in set(pool._published) - {first}:
        pool.free(slot)
    pool.publish(pool.allocate("b"), 7, 4.0)
    pool.sign("steady", 5.0, served=True)
    pool.free(first)
    pool.sign("x", 6.0, served=True)
    assert pool._signs[True] == {"steady": 5.0, "x": 6.0}


def test_an_owner_above_its_share_waits_for_the_others():
    """An owner with more than its share gets no slot while others have less.

    For example, ranks of a dead server hold the slots that they took while owners were few.
    """
    pool = SlotPool(16, TIMES)
    first = drain(pool, "a")
    for owner in "bcde":
        take(pool, owner)
    assert len(first) == 8
    assert share_of(16, 5) == 2
    pool.free(first.pop())
    assert take(pool, "a") is None
    assert len(drain(pool, "b")) == 1
    for slot in first[1:]:
        pool.free(slot)
    assert len(drain(pool, "a")) == 1


def test_a_published_slot_is_freed_by_its_ack_or_expires():
    pool = SlotPool(8, TIMES)
    one, other = take(pool, "a"), take(pool, "b")
    pool.publish(one, 7, 0.0)
    pool.publish(other, 8, 1.0)
    wrong = [(one, 8), (one, 0), (other, 7), (99, 7), (-1, 7)]
    assert pool.acknowledge(wrong, 2.0) == [slot for slot, _ in wrong]
    assert pool._signs == ({}, {})
    assert (len(pool._published), len(pool.free_slots)) == (2, 6)
    assert pool.expire(TIMES.slot_aside - 0.01) == []
    assert pool.expire(TIMES.slot_aside) == [one]
    assert pool.acknowledge([(one, 7), (other, 8)]) == [one]
    assert (len(pool._published), len(pool.free_slots), list(slot_violations(pool))) == (0, 8, [])


# ---------------------------------------------------------------- turns


def turns_of(work: dict[str, int]) -> RoundRobin[str]:
    turns: RoundRobin[str] = RoundRobin()
    for owner, items in work.items():
        for number in range(1, items + 1):
            turns.add(owner, f"{owner}{number}")
    return turns


def served(turns: RoundRobin[str], pool: SlotPool, most: int = 99) -> list[str]:
    return [item for item, _ in turns.take(pool, most)]


RUNS = [({}, ["a1", "a2", "a1", "a2"]), ({"run": 2}, ["a1", "a1", "a2", "a2"])]


@pytest.mark.parametrize(("run", "of_one"), RUNS)
def test_owners_take_turns_and_an_item_gets_a_run_of_slots(run, of_one):
    """Owners take turns, and an item gets up to `run` slots per turn, which form one message.

    An item that wants more slots is added again, after its owner's other items.
    """
    pool, turns, found = SlotPool(64, TIMES), RoundRobin(**run), []
    for item in ("a1", "a2", "b1", "a1"):
        turns.add(item[0], item)  # the second a1 has no effect
    for item, _ in turns.take(pool, 8):
        found.append(item)
        turns.add(item[0], item)
    assert found == [*of_one, *["b1"] * 4]
    assert [item for item, _ in turns.take(pool, 2)] == ["a1", "b1"]


def test_the_owner_that_waits_longest_is_first():
    pool = SlotPool(4, TIMES)
    held = [take(pool, owner) for owner in "wxyz"]
    turns = turns_of({"a": 1, "b": 1, "c": 1})
    assert served(turns, pool) == []
    pool.free(held[0])
    turns.add("d", "d1")
    assert served(turns, pool) == ["a1"]
    for slot in held[1:]:
        pool.free(slot)
    assert served(turns, pool, most=2) == ["b1", "c1"]
    assert served(turns, pool) == ["d1"]


@given(st.integers(2, 6), st.lists(st.integers(1, 3), min_size=4, max_size=12))
def test_readers_that_always_wait_get_equal_numbers(owners: int, freed: list[int]) -> None:
    """Readers that always wait get the same number of slots, give or take one.

    An owner that was served comes after all others, however many slots are free at a time.
    """
    pool, turns, got = SlotPool(3, TIMES), RoundRobin(), dict.fromkeys(range(owners), 0)
    for owner in got:
        for n in range(len(freed) * 3):
            turns.add(owner, (owner, n))
    for some in freed:
        for (owner, _), slot in list(turns.take(pool, some)):
            got[owner] += 1
            pool.free(slot)
        assert max(got.values()) - min(got.values()) <= 1


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    st.integers(2, 60),
    st.integers(1, 60),
)
def test_no_waiting_owner_falls_behind(work, slots, most):
    """No owner gets two more slots than a waiting owner, and none waits while it may get a slot."""
    pool, turns = SlotPool(slots, TIMES), RoundRobin()
    left = {(owner, n): wanted for owner, items in work.items() for n, wanted in enumerate(items)}
    for item in left:
        turns.add(item[0], item)
    for item, _ in turns.take(pool, most):
        left[item] -= 1
        if left[item]:
            turns.add(item[0], item)
    counts = Counter({owner: pool.held[owner] for owner in work})
    waiting = {owner for (owner, _), wanted in left.items() if wanted}
    assert all(counts[other] <= counts[owner] + 1 for owner in waiting for other in work)
    given = sum(counts.values())
    assert given == most or all(take(pool, owner) is None for owner in waiting)
    assert sum(map(len, turns.owners.values())) == sum(wanted > 0 for wanted in left.values())


class Owners(RuleBasedStateMachine):
    """Owners that request, hold, publish and free slots independently of each other.

    Some owners both hold and wait for slots. `left`: the number of slots that each item still
    wants.
    """

    items = st.tuples(st.sampled_from("abcdef"), st.integers(0, 2))

    @initialize(count=st.integers(2, 40), run=st.integers(1, 3))
    def begin(self, count: int, run: int) -> None:
        self.pool, self.turns = SlotPool(count, TIMES), RoundRobin[tuple[str, int]](run)
        self.left = Counter[tuple[str, int]]()
        self.slots = list[int]()
        self.now = 0.0

    @rule(item=items, wanted=st.integers(1, 20))
    def wants(self, item: tuple[str, int], wanted: int) -> None:
        self.left[item] += wanted
        self.turns.add(item[0], item)

    @rule(item=items)
    def gives_up(self, item: tuple[str, int]) -> None:
        del self.left[item]
        self.turns.remove(item[0], item)

    @rule(limit=st.integers(0, 40))
    def takes(self, limit: int) -> None:
        """Give slots, and check that no owner exceeds its share, except with a first slot.

        Every owner that holds or wants slots counts for the share. An owner below its share waits
        only if at most the reserve is free.
        """
        pool, before = self.pool, Counter(self.pool.held)
        waiting = {owner for owner, _ in self.left}
        share = share_of(pool.count, len({*waiting, *before})) if waiting or before else 0
        given = 0
        for item, slot in self.turns.take(pool, limit):
            given += 1
            self.slots.append(slot)
            self.left[item] -= 1
            if self.left[item]:
                self.turns.add(item[0], item)
            else:
                del self.left[item]
        for owner in waiting:
            assert pool.held[owner] <= max(share, before[owner], 1)
        assert given <= limit
        if given < limit:
            for owner in {owner for owner, _ in self.left}:
                assert pool.held[owner] >= share or len(pool.free_slots) <= pool.count // 4

    @precondition(lambda self: self.slots)
    @rule(which=st.integers(0, 39), some=st.integers(1, 9))
    def frees(self, which: int, some: int) -> None:
        for _ in range(min(some, len(self.slots))):
            self.pool.free(self.slots.pop(which % len(self.slots)))

    @precondition(lambda self: self.slots)
    @rule(which=st.integers(0, 39))
    def publishes(self, which: int) -> None:
        self.now += 1.0
        slot = self.slots[which % len(self.slots)]
        if slot not in self.pool._published:
            self.pool.publish(slot, 1 + slot, self.now)

    @rule(owner=st.sampled_from("abcdef"), served=st.booleans())
    def is_heard(self, owner: str, served: bool) -> None:
        self.pool.sign(owner, self.now, served)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "pool"):
            assert list(slot_violations(self.pool)) == []
            queued = {item for queue in self.turns.owners.values() for item in queue}
            assert queued == {*self.left}


TestOwners = Owners.TestCase
