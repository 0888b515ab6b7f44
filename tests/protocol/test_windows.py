"""If a drafter reads only the last tokens of a prompt, only the rows of these tokens are moved.
Prefill does not send earlier rows, and decode does not write them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rig.ring.model import Cache, Case, Request
from rig.ring.run import right

pytestmark = pytest.mark.transports(1)

# The window begins inside a page or at its start, inside a chunk or at its start, or before the
# prompt.
REQUESTS = tuple(Request(n, chunk_pages=c) for n in (1, 9, 22, 24, 25) for c in (0, 1, 4))


@pytest.mark.parametrize("window", [1, 8, 9])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_only_rows_in_the_window_are_moved(
    prefill_tp: int, decode_tp: int, window: int, page_size: int
) -> None:
    right(Case(prefill_tp, decode_tp, requests=REQUESTS, draft_window=window, page_size=page_size))


def test_a_window_saves_most_bytes_of_a_long_prompt() -> None:
    """With a window of 2,048 of 16,384 tokens, the plugin moves at most 15 % of the bytes."""
    long = Request(16 << 10, chunk_pages=32)
    case = Case(2, 1, draft=Cache("mha", layers=2, heads=4), requests=(long,), page_size=64)
    whole = right(case).total("needed_bytes_total")
    moved = right(replace(case, draft_window=2048)).total("needed_bytes_total")
    assert 0 < moved <= 0.15 * whole
