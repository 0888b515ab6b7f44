"""Which heads a decode rank reads from which prefill rank, beside a brute force."""

from __future__ import annotations

import pytest

from sglang_mixkv.draft.layout import heads_on_rank
from sglang_mixkv.draft.routes import NO_HEADS, overlap, readers_of, routes
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_pair import contacted

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def divides(left: int, right: int) -> bool:
    return not (left % right and right % left)


CASES = [
    (total, p, d)
    for total in HEADS
    for p in SIZES
    for d in SIZES
    if divides(p, d) and divides(total, p) and divides(total, d)
]


def heads_by_brute_force(total: int, tp: int, rank: int) -> set[int]:
    """Each head has tp/total ranks, or each rank total/tp heads."""
    first = [head * tp // total for head in range(total)]
    behind = [-(-(head + 1) * tp // total) for head in range(total)]
    return {head for head in range(total) if first[head] <= rank < behind[head]}


def test_there_are_cases_of_each_kind():
    assert len(CASES) > 200
    assert any(p > d > total for total, p, d in CASES)
    assert any(p < d and d > total for total, p, d in CASES)


@pytest.mark.parametrize(("total", "p", "d"), CASES)
def test_each_needed_head_is_read_once_from_a_rank_that_holds_it(total, p, d):
    for rank in range(d):
        needed = heads_on_rank(total, d, rank)
        met = contacted(p, d, rank)
        held = [heads_on_rank(total, p, other) for other in met]
        found = routes(held, needed)
        assert len(found) == len(met)
        assert [head for heads in found for head in heads] == list(needed)
        for heads, of_rank in zip(found, held, strict=True):
            assert set(heads) <= set(of_rank)


@pytest.mark.parametrize(("total", "p", "d"), CASES)
def test_a_head_comes_from_the_first_rank_that_holds_it(total, p, d):
    for rank in range(d):
        met = contacted(p, d, rank)
        expected: list[set[int]] = [set() for _ in met]
        for head in heads_by_brute_force(total, d, rank):
            holders = [n for n, o in enumerate(met) if head in heads_by_brute_force(total, p, o)]
            expected[holders[0]].add(head)
        held = [heads_on_rank(total, p, other) for other in met]
        assert [set(heads) for heads in routes(held, heads_on_rank(total, d, rank))] == expected


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("d", SIZES)
def test_readers_of_is_the_inverse_of_the_contacted(p, d):
    if not divides(p, d):
        with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
            readers_of(p, d)
        return
    for rank in range(p):
        assert readers_of(p, d) == sum(rank in contacted(p, d, reader) for reader in range(d))


def test_a_rank_whose_heads_are_replicated_elsewhere_is_read_by_nobody():
    held = [heads_on_rank(2, 8, rank) for rank in range(8)]
    assert held[0] == held[3] == range(1)
    found = routes(held[:4], range(1))
    assert found == (range(1), NO_HEADS, NO_HEADS, NO_HEADS)


@pytest.mark.parametrize(
    ("held", "needed"),
    [
        ([], range(1)),
        ([range(1)], range(2)),
        ([range(1, 2)], range(2)),
        ([range(1), range(2, 3)], range(3)),
        ([range(1, 2), range(1)], range(2)),
    ],
)
def test_a_head_that_no_rank_holds_is_refused(held, needed):
    with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
        routes(held, needed)


@pytest.mark.parametrize(("p", "d"), [(0, 1), (1, 0), (-1, 1), (2, 3)])
def test_sizes_without_a_route_are_refused(p, d):
    with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
        readers_of(p, d)


@pytest.mark.parametrize(("total", "tp"), [(0, 1), (-1, 1), (3, 2), (4, 3), (6, 4)])
def test_heads_that_no_tp_size_divides_are_refused(total, tp):
    with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
        heads_on_rank(total, tp, 0)


@pytest.mark.parametrize(("total", "tp"), [(t, p) for t in HEADS for p in SIZES if divides(t, p)])
def test_ranks_hold_all_heads_evenly(total, tp):
    held = [head for rank in range(tp) for head in heads_on_rank(total, tp, rank)]
    assert sorted(held) == sorted(list(range(total)) * (len(held) // total))
    for rank in range(tp):
        assert set(heads_on_rank(total, tp, rank)) == heads_by_brute_force(total, tp, rank)


@pytest.mark.parametrize("left", [range(a, b) for a in range(4) for b in range(a, 5)])
@pytest.mark.parametrize("right", [range(a, b) for a in range(4) for b in range(a, 5)])
def test_overlap(left, right):
    assert list(overlap(left, right)) == sorted(set(left) & set(right))
