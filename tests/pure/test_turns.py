"""Owners take turns, and one that waits costs one look."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sglang_mixkv.channel.turns import Turns


def turns_of(work: dict[str, list[str]]) -> Turns[str]:
    turns: Turns[str] = Turns()
    for owner, items in work.items():
        for item in items:
            turns.add(owner, item, owner + item)
    return turns


def always() -> bool:
    return True


def test_owners_alternate_and_so_do_an_owner_s_items():
    turns = turns_of({"a": ["1", "2"], "b": ["1"]})
    served: list[str] = []

    def serve_one(item: str) -> bool:
        served.append(item)
        return served.count(item) < 2  # each has two pieces

    turns.serve(serve_one, always)
    assert served == ["a1", "b1", "a2", "b1", "a1", "a2"]
    assert len(turns) == 0


def test_an_item_that_is_added_twice_is_served_once():
    turns, served = turns_of({"a": ["1", "1"]}), []
    turns.serve(lambda item: bool(served.append(item)), always)
    assert served == ["a1"]


def test_an_owner_that_waits_costs_one_look_and_stops_nobody():
    turns, looks = turns_of({"a": ["1", "2", "3"], "b": ["1", "2"]}), []

    def serve_one(item: str) -> bool | None:
        looks.append(item)
        return None if item[0] == "a" else False

    turns.serve(serve_one, always)
    assert looks == ["a1", "b1", "b2"]
    assert len(turns) == 3


def test_without_a_slot_nobody_is_asked_but_for_what_was_added():
    """It may need none. One slot is for who waits longest, and the others cost nothing."""
    turns, looks, free = turns_of({"a": ["1"], "b": ["1"], "c": ["1"]}), [], 0

    def serve_one(item: str) -> bool | None:
        nonlocal free
        looks.append(item)
        if item == "d, without":
            return False
        if not free:
            return None
        free -= 1
        return False

    def serve() -> list[str]:
        looks.clear()
        turns.serve(serve_one, lambda: free)
        return list(looks)

    assert serve() == ["a1", "b1", "c1"]
    assert serve() == []
    turns.add("d", "", "d, without")
    assert serve() == ["d, without"]
    free = 1
    turns.add("e", "1", "e1")
    assert serve() == ["a1", "e1"]
    assert serve() == []
    free = 3
    assert serve() == ["b1", "c1", "e1"]


def test_the_item_that_waited_is_the_first_of_the_next_round():
    turns, looks = turns_of({"a": ["1", "2"]}), []
    turns.serve(lambda item: None, always)
    turns.serve(lambda item: bool(looks.append(item)), always)
    assert looks == ["a1", "a2"]


def test_removed_items_are_not_served():
    turns, served = turns_of({"a": ["1", "2"], "b": ["1"]}), []
    turns.remove("a", "1")
    turns.remove("b", "1")
    turns.remove("b", "1")
    turns.remove("c", "never added")
    assert len(turns) == 1
    turns.serve(lambda item: bool(served.append(item)), always)
    assert served == ["a2"]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    st.integers(0, 40),
)
def test_all_pieces_are_served_and_no_owner_is_ahead(work, slots):
    """Each item has some pieces. Nobody gets a second more than another that still waits."""
    turns: Turns[tuple[str, int]] = Turns()
    left = {(owner, n): pieces for owner, items in work.items() for n, pieces in enumerate(items)}
    for owner, n in left:
        turns.add(owner, n, (owner, n))
    served: list[str] = []

    def serve_one(item: tuple[str, int]) -> bool | None:
        if len(served) >= slots:
            return None
        served.append(item[0])
        left[item] -= 1
        return left[item] > 0

    turns.serve(serve_one, lambda: len(served) < slots)
    total = sum(sum(items) for items in work.values())
    assert len(served) == min(total, slots)
    counts = Counter(served)
    waiting = {owner for (owner, _), pieces in left.items() if pieces}
    assert all(counts[other] <= counts[owner] + 1 for owner in waiting for other in work)
    assert len(turns) == sum(pieces > 0 for pieces in left.values())
