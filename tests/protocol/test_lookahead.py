"""Pages that hold no token of the prompt, and tokens in front that decode has already.

Prefill can send more pages than the prompt fills; `num_kv_tokens` says how many tokens are sent.
Decode names those that the prompt fills (`req_to_token[prefix:origin_input_len]`). Rows are
numbered in the prompt, so a drafter's rows land right whatever pages each side has, and none is
written behind the prompt.
"""

from __future__ import annotations

import itertools

import pytest
from rig.model import Case, Request
from rig.ring import right
from rig.special import Special

pytestmark = pytest.mark.transports(1)

EDGES = (8, 7)  # tokens: ends on a page's boundary, and one token before


@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_rows_are_those_of_the_prompt(
    prefill_tp: int, decode_tp: int, surplus: int, backend: str
) -> None:
    """In one chunk and in several, of which the last has surplus alone; with a prefix and
    without."""
    # A last chunk for which decode has no page at all fails SGLang's own transfer over NIXL.
    chunks = (0,) if (backend, surplus) == ("nixl", 2) else (0, 1)
    requests = tuple(itertools.starmap(Request, itertools.product(EDGES, (0, 2), chunks)))
    special = Special(surplus={"prefill": surplus})
    right(Case(prefill_tp, decode_tp, requests=requests, special=special))


def test_a_prompt_that_decode_has_whole_needs_nothing() -> None:
    """SGLang's last chunk has no page then (decode.py, a prefix as long as the prompt)."""
    right(Case(2, 1, requests=(Request(0, prefix_pages=2), Request(8))))
