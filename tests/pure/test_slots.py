"""The slot pool: each slot is free or held once, and no owner takes what others need."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rig.books import wrong_slots

from sglang_mixkv.channel.slots import SLOTS, RoundRobin, SlotPool, share_of, slot_bytes
from sglang_mixkv.channel.times import Times

TIMES = Times()
OWNERS = st.sampled_from("abc")


def drain(pool: SlotPool, owner: str, now: float = 0.0) -> list[int]:
    taken = []
    while (slot := pool.take(owner, now)) is not None:
        taken.append(slot)
    return taken


@pytest.mark.parametrize("count", [2, 8, 16, SLOTS])
@pytest.mark.parametrize("owners", [1, 2, 3, 4, 8])
def test_what_each_of_several_owners_gets(count, owners):
    """Taking turns, as chunks do that are packed for several readers."""
    pool = SlotPool(count, TIMES)
    names = range(owners)
    while [slot for name in names if (slot := pool.take(name, 0.0)) is not None]:
        pass
    if owners <= count:
        assert min(map(pool._held.__getitem__, names)) == share_of(count, owners)


def test_a_slot_holds_an_aligned_part_of_the_staging_buffer_and_its_stamps():
    assert slot_bytes(256) == (4 << 20) + 4096
    assert slot_bytes(1) == (1 << 20) // SLOTS + 4096


def test_fewer_than_two_slots_are_refused():
    with pytest.raises(ValueError, match="at least two"):
        SlotPool(1, TIMES)


def test_the_last_quarter_is_for_owners_that_hold_none():
    pool = SlotPool(16, TIMES)
    for owner in "abc":
        drain(pool, owner)
    assert pool.free_slots == 4
    assert len(drain(pool, "d")) == 1
    assert len(drain(pool, "e")) == 1
    assert pool.take("d", 0.0) is None


def test_an_owner_whose_slot_is_late_gets_one_at_a_time():
    pool = SlotPool(16, TIMES)
    slot = pool.take("a", 0.0)
    pool.offer(slot, 1, 0.0)
    late = TIMES.late_ack
    earlier = pool.take("a", late * 0.99)
    assert pool.take("a", late) is None
    assert pool.take("b", late) is not None
    pool.free(earlier)
    other = pool.take("a", late)
    assert other is not None, "an ACK may be lost for good"
    assert pool.take("a", late) is None
    pool.free(other)
    assert pool.acknowledge(slot, 1)
    assert len(drain(pool, "a", late)) == 4


def test_a_slot_is_aside_for_longer_than_anything_can_read_it():
    assert TIMES.slot_aside > TIMES.delivery + TIMES.stall + TIMES.read


def test_the_slot_that_was_free_longest_is_taken():
    pool = SlotPool(4, TIMES)
    slot = pool.take("a", 0.0)
    pool.free(slot)
    assert [pool.take(owner, 0.0) for owner in "abcd"] == [1, 2, 3, 0]


@pytest.mark.parametrize("damage", ["free twice", "lost", "offered", "count"])
def test_check_names_wrong_books(damage):
    pool = SlotPool(4, TIMES)
    slot = pool.take("a", 0.0)
    if damage == "free twice":
        pool._free.append(3)
    elif damage == "lost":
        pool._free.pop()
    elif damage == "offered":
        pool._offered[3] = 0.0, 1
    else:
        pool._held["a"] += 1
    assert len(list(wrong_slots(pool))) == 1, (damage, slot)


class SlotPoolMachine(RuleBasedStateMachine):
    """The pool beside a plain list of what each slot is."""

    @initialize(count=st.integers(2, 20))
    def begin(self, count):
        self.pool, self.now, self.stamp = SlotPool(count, TIMES), 0.0, 0
        self.count, self.quota, self.reserve = count, max(2, count // 4), count // 4
        self.taken: dict[int, str] = {}
        self.offered: dict[int, tuple[str, float, int]] = {}

    def held(self, owner):
        held = [*self.taken.values(), *(o for o, _, _ in self.offered.values())]
        return held.count(owner)

    def late(self, owner):
        limit = self.now - TIMES.late_ack
        return sum(o == owner and since <= limit for o, since, _ in self.offered.values())

    @rule(owner=OWNERS)
    def take(self, owner):
        held, free = self.held(owner), self.count - len(self.taken) - len(self.offered)
        one_more = self.late(owner) in (0, held)
        more = held < self.quota and free > self.reserve and one_more
        expected = free > 0 and (not held or more)
        slot = self.pool.take(owner, self.now)
        assert (slot is not None) == expected
        if slot is not None:
            assert slot not in self.taken
            assert slot not in self.offered
            self.taken[slot] = owner

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def offer(self, data):
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.stamp += 1
        self.pool.offer(slot, self.stamp, self.now)
        self.offered[slot] = self.taken.pop(slot), self.now, self.stamp

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data):
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.pool.free(slot)
        del self.taken[slot]

    @rule(data=st.data())
    def acknowledge(self, data):
        slot = data.draw(st.integers(-1, self.count))
        stamps = [0, self.stamp, *(stamp for _, _, stamp in self.offered.values())]
        stamp = data.draw(st.sampled_from(stamps))
        expected = slot in self.offered and self.offered[slot][2] == stamp
        assert self.pool.acknowledge(slot, stamp) == expected
        if expected:
            del self.offered[slot]

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 60.0]))
    def wait(self, seconds):
        self.now += seconds
        limit = self.now - TIMES.slot_aside
        expected = [slot for slot, (_, since, _) in self.offered.items() if since <= limit]
        assert self.pool.expire(self.now) == expected
        for slot in expected:
            del self.offered[slot]

    @invariant()
    def the_books_are_right(self):
        assert list(wrong_slots(self.pool)) == []
        assert self.pool.offered == len(self.offered)
        assert self.pool.free_slots == self.count - len(self.taken) - len(self.offered)
        for owner in "abc":
            assert self.pool._held[owner] == self.held(owner) <= self.quota


TestSlotPool = SlotPoolMachine.TestCase
TestSlotPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------- who gets them


def turns_of(work: dict[str, int]) -> RoundRobin[str]:
    turns: RoundRobin[str] = RoundRobin()
    for owner, items in work.items():
        for number in range(1, items + 1):
            turns.add(owner, f"{owner}{number}")
    return turns


def served(turns: RoundRobin[str], pool: SlotPool, most: int = 99) -> list[str]:
    return [item for item, _ in turns.take(pool, 0.0, most)]


def test_owners_alternate_and_so_do_an_owners_items():
    """Items that are added again, as they want another slot, are behind the others."""
    turns, pool, found = turns_of({"a": 2, "b": 1}), SlotPool(64, TIMES), []
    for item, _ in turns.take(pool, 0.0, 99):
        found.append(item)
        if found.count(item) < 2:
            turns.add(item[0], item)
    assert found == ["a1", "b1", "a2", "b1", "a1", "a2"]
    assert len(turns) == 0


def test_an_item_that_is_added_twice_is_served_once():
    turns = turns_of({"a": 1})
    turns.add("a", "a1")
    assert served(turns, SlotPool(8, TIMES)) == ["a1"]


def test_an_owner_that_waits_is_asked_once_and_stops_nobody(monkeypatch):
    pool, asked = SlotPool(8, TIMES), []
    real = pool.take
    monkeypatch.setattr(pool, "take", lambda owner, now: asked.append(owner) or real(owner, now))
    drain(pool, "a")
    asked.clear()
    assert served(turns_of({"a": 3, "b": 2}), pool) == ["b1", "b2"]
    assert asked == ["a", "b", "b"]


def test_nobody_is_asked_while_no_slot_is_free_and_who_waits_longest_is_first(monkeypatch):
    pool = SlotPool(4, TIMES)
    held = [pool.take(owner, 0.0) for owner in "wxyz"]
    turns = turns_of({"a": 1, "b": 1, "c": 1})
    monkeypatch.setattr(pool, "take", None)
    assert served(turns, pool) == []
    monkeypatch.undo()
    pool.free(held[0])
    turns.add("d", "d1")
    assert served(turns, pool) == ["a1"]
    for slot in held[1:]:
        pool.free(slot)
    assert served(turns, pool, most=2) == ["b1", "c1"]
    assert served(turns, pool) == ["d1"]


def test_removed_items_are_not_served():
    turns = turns_of({"a": 2, "b": 1})
    for owner, item in (("a", "a1"), ("b", "b1"), ("b", "b1"), ("c", "never added")):
        turns.remove(owner, item)
    assert len(turns) == 1
    assert served(turns, SlotPool(8, TIMES)) == ["a2"]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    st.integers(2, 60),
)
def test_no_owner_that_can_have_a_slot_is_behind(work, slots):
    """Each item wants some slots. Nobody gets a second more than another that still waits and has
    not reached its quota."""
    pool, turns = SlotPool(slots, TIMES), RoundRobin()
    left = {(owner, n): wanted for owner, items in work.items() for n, wanted in enumerate(items)}
    for item in left:
        turns.add(item[0], item)
    for item, _ in turns.take(pool, 0.0, 99):
        left[item] -= 1
        if left[item]:
            turns.add(item[0], item)
    counts = Counter({owner: pool._held[owner] for owner in work})
    waiting = {owner for (owner, _), wanted in left.items() if wanted}
    assert all(counts[other] <= counts[owner] + 1 for owner in waiting for other in work)
    assert all(pool.take(owner, 0.0) is None for owner in waiting)
    assert len(turns) == sum(wanted > 0 for wanted in left.values())
