"""Decode context parallelism: pages of decode that hold several of prefill's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mixkv.engine.dcp import tokens_of
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.layout import Component, Kind, Shard, Spread
from sglang_mixkv.kv.pages import in_parts, pages_to_send, window_start
from sglang_mixkv.kv.plan import Copies
from sglang_mixkv.kv.routes import check_dcp

MLA, GQA = Spread(Kind.MLA), Spread(Kind.MHA, 4)
parts = st.sampled_from([1, 2, 4, 8])


@pytest.mark.parametrize(
    ("prefill", "decode", "target", "reason"),
    [
        ((2, 1), (4, 1), GQA, ""),
        ((2, 1), (4, 2), MLA, ""),
        ((4, 4), (4, 4), MLA, ""),
        ((2, 1), (4, 2), GQA, "an MLA target with --dcp-size above 1"),
        ((4, 2), (4, 1), MLA, "--dcp-size 1 on prefill, or decode's 1"),
        ((4, 2), (4, 4), MLA, "--dcp-size 1 on prefill, or decode's 4"),
        ((4, 2), (2, 2), MLA, "equal attention-TP sizes with --dcp-size 2 on both sides"),
    ],
)
def test_sizes(
    prefill: tuple[int, int], decode: tuple[int, int], target: Spread, reason: str
) -> None:
    if not reason:
        check_dcp(prefill, decode, target)
        return
    with pytest.raises(MixKVError, match=reason):
        check_dcp(prefill, decode, target)


@settings(deadline=None)
@given(parts, st.sampled_from([1, 4, 16]), st.lists(st.integers(0, 99), min_size=1, unique=True))
def test_tokens_keep_their_place(count: int, size: int, numbers: list[int]) -> None:
    """Token t of a request is row t % (size * count) of its decode page t // (size * count)."""
    tokens = np.arange(len(numbers) * size * count)
    page, row = np.divmod(tokens, size * count)
    rows = np.array(numbers)[page] * size * count + row
    found = in_parts(np.array(numbers), count)[tokens // size] * size + tokens % size
    assert (found == rows).all()


@settings(deadline=None)
@given(parts, st.sampled_from([1, 4, 16]), st.integers(1, 40), st.integers(1, 50), st.data())
def test_what_a_window_reads_is_sent(
    count: int, size: int, total: int, window: int, data: st.DataObject
) -> None:
    """Wherever in the last of decode's pages the prompt ends."""
    last = data.draw(st.integers((total - 1) * size * count + 1, total * size * count))
    oldest = max(0, last - 1 - window)
    assert window_start(total * count, size, window, count) <= oldest // size


@pytest.mark.parametrize(
    ("tokens", "start", "sent"), [(16, 0, 4), (13, 0, 4), (5, 0, 2), (9, 2, 3), (1, 4, 1)]
)
def test_a_last_page_can_stay_unfilled(tokens: int, start: int, sent: int) -> None:
    """8 tokens in a page of decode, 4 in one of prefill."""
    total = -(-(start * 4 + tokens) // 8) * 2
    offered = -(-tokens // 4)
    assert pages_to_send(offered, tokens, 4, start, total, last=True, parts=2) == sent


@pytest.mark.parametrize(("tokens", "total"), [(16, 6), (20, 4), (4, 4)])
def test_a_whole_page_too_few_or_too_many_is_refused(tokens: int, total: int) -> None:
    with pytest.raises(MixKVError, match="the decode side allocated"):
        pages_to_send(tokens // 4, tokens, 4, 0, total, last=True, parts=2)


def test_a_split_shard_is_the_same_memory() -> None:
    """Two heads of 8 bytes in K, of 4 in V, 16 tokens a page, 3 pages."""
    items = (16 * 2 * 8, 16 * 2 * 4)
    whole = Shard(Component(GQA, items, tuple(3 * n for n in items), (7, 0)), 16, 2, 1)
    part = whole.split(4)
    assert (part.page_size, part.parts, part.pages) == (4, 4, 12)
    assert (part.rows, part.head_bytes, part.heads) == (whole.rows, whole.head_bytes, whole.heads)
    assert part.component.windows == (7, 0)
    assert part.numbered(np.array([2, 0])).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert whole.split(1) == whole


def test_joined_rows() -> None:
    one = np.array([8])
    row = Copies(one * 100, one * 200, one, one, one * 0, one * 0, one)
    joined = row.joined(4)
    assert (joined.src, joined.dst, joined.bytes_per_token) == (row.src, row.dst, 32)
    assert len(joined.parts.whole) == 1


@settings(deadline=None)
@given(parts, st.integers(0, 50), st.integers(0, 50))
def test_each_token_is_one_ranks(size: int, first: int, count: int) -> None:
    owned = [tokens_of(rank, size, first, count) for rank in range(size)]
    assert owned == [sum(t % size == r for t in range(first, first + count)) for r in range(size)]
