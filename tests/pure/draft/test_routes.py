"""The heads that a decode rank reads from each prefill rank, compared with a brute-force search."""

from __future__ import annotations

import pytest
from rig.channel.contacts import contacted

from sglang_mixkv.draft.layout import heads_on_rank, readers_of, routes
from sglang_mixkv.errors import MixKVError

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


PAIRS = [(p, d) for p in SIZES for d in SIZES if not (p % d and d % p)]


def heads_by_brute_force(total: int, tp: int, rank: int) -> set[int]:
    """Return a rank's heads. A head is on tp/total ranks, or a rank has total/tp heads."""
    return {h for h in range(total) if h * tp // total <= rank < -(-(h + 1) * tp // total)}


@pytest.mark.parametrize("total", HEADS)
def test_each_head_is_read_from_the_first_rank_with_it(total):
    cases = [pair for pair in PAIRS if not any(total % tp and tp % total for tp in pair)]
    assert len(cases) > 5
    for p, d in cases:
        for rank in range(d):
            met = contacted(p, d, rank)
            expected: list[set[int]] = [set() for _ in met]
            for head in heads_by_brute_force(total, d, rank):
                holding = (head in heads_by_brute_force(total, p, other) for other in met)
                expected[list(holding).index(True)].add(head)
            held, needed = [heads_on_rank(total, p, n) for n in met], heads_on_rank(total, d, rank)
            found = routes(held, needed)
            assert [set(heads) for heads in found] == expected, (p, d, rank)
            assert [head for heads in found for head in heads] == list(needed)


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_readers_of_is_the_inverse_of_contacted(p, d):
    for rank in range(p):
        assert readers_of(p, d) == sum(rank in contacted(p, d, reader) for reader in range(d))


ONE, TWO, THREE = range(1), range(1, 2), range(2, 3)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        *((routes, (held, range(n))) for n, held in (
            (1, []), (2, [ONE]), (2, [TWO]), (3, [ONE, THREE]), (2, [TWO, ONE]))),
        *((readers_of, sizes) for sizes in ((0, 1), (1, 0), (-1, 1), (2, 3))),
        *((heads_on_rank, (*sizes, 0)) for sizes in ((0, 1), (-1, 1), (3, 2), (4, 3), (6, 4))),
    ],
)  # fmt: skip
def test_sizes_without_a_route_are_refused(call, args):
    with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
        call(*args)
