"""Pages that hold no token of the prompt, and tokens in front that decode has already.

SGLang's speculation allocates beyond the prompt, so that either side can name more pages than the
prompt fills; `num_kv_tokens` says how many tokens are sent. Rows are numbered in the prompt, so a
drafter's rows land right whatever pages each side has, and none is written behind the prompt.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from rig.model import Case, Request, surplus_pages
from rig.rank import Rank
from rig.ring import right
from rig.special import Special

pytestmark = pytest.mark.transports(1)

EDGES = (8, 7)  # tokens: ends on a page's boundary, and one token before
SURPLUS = {
    "behind on both": {"prefill": 1, "decode": 1},
    "behind on prefill": {"prefill": 2},
    "behind on decode": {"decode": 2},
    "more on decode": {"prefill": 1, "decode": 2},
    "none": {},
}


def stock_writes_its_surplus(rank: Rank) -> None:
    """SGLang sends the target's pages whole: those behind the prompt may hold anything."""
    real = rank.compare

    def compare(before: Any, aux_before: Any, done: list[int]) -> None:
        for number in done:
            pages = surplus_pages(rank.case, "decode", number)
            for want, got in zip(before["target"], rank.pools["target"], strict=True):
                want[pages] = got[pages]
        real(before, aux_before, done)

    rank.compare = compare  # type: ignore[method-assign]


@pytest.mark.parametrize("surplus", SURPLUS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_rows_are_those_of_the_prompt(
    prefill_tp: int, decode_tp: int, surplus: str, backend: str
) -> None:
    """In one chunk and in several, of which the last has surplus alone; with a prefix and
    without."""
    # A last chunk for which decode has no page at all fails SGLang's own transfer over NIXL.
    chunks = (0,) if (backend, surplus) == ("nixl", "behind on prefill") else (0, 1)
    requests = tuple(itertools.starmap(Request, itertools.product(EDGES, (0, 2), chunks)))
    faults = {("decode", rank): stock_writes_its_surplus for rank in range(decode_tp)}
    special = Special(surplus=SURPLUS[surplus], faults=faults)
    right(Case(prefill_tp, decode_tp, requests=requests, special=special))


def test_a_prompt_that_decode_has_whole_needs_nothing() -> None:
    """SGLang's last chunk has no page then (decode.py, a prefix as long as the prompt)."""
    right(Case(2, 1, requests=(Request(0, prefix_pages=2), Request(8))))
