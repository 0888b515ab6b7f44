"""Routes and plans, as properties: each needed byte once, nothing else, both sides agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.layout import Component, Kind, Shard, Spread, heads_on_rank
from sglang_mixkv.kv.plan import Plan, Reach, component_copies
from sglang_mixkv.kv.ranges import blocks, page_runs
from sglang_mixkv.kv.routes import Topology, contacted_ranks, overlap, required_responses, routes

sizes = st.sampled_from([1, 2, 4, 8, 3, 6, 12])
head_counts = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
spreads = st.just(Spread(Kind.MLA)) | st.builds(Spread, st.just(Kind.MHA), head_counts)


def fits(tp: int, spread: Spread | None) -> bool:
    return (
        spread is None
        or spread.kind is Kind.MLA
        or not (spread.total_heads % tp and tp % spread.total_heads)
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    prefill, decode = draw(
        st.tuples(sizes, sizes).filter(lambda pd: not (pd[0] % pd[1] and pd[1] % pd[0]))
    )
    both = spreads.filter(lambda s: fits(prefill, s) and fits(decode, s))
    stages = draw(st.integers(1, 3))
    return Topology(
        prefill_tp=prefill,
        decode_tp=decode,
        target=draw(both),
        draft=draw(st.none() | both),
        stages=tuple(range(stages)),
        last_stage=stages - 1,
        sharded_state=draw(st.booleans()),
    )


@given(topologies())
def test_each_needed_head_is_sent_once(topology: Topology) -> None:
    for rank in range(topology.decode_tp):
        table = routes(topology, rank)
        for stage in topology.stages:
            rows = [r for r in table if r.stage == stage]
            sent = [h for r in rows for h in r.target_heads]
            assert sent == list(topology.target.on_rank(topology.decode_tp, rank))
            drafted = [h for r in rows for h in r.draft_heads]
            needed = topology.draft and stage == topology.last_stage
            assert drafted == (
                list(topology.draft.on_rank(topology.decode_tp, rank)) if needed else []
            )


@given(topologies())
def test_senders_hold_what_they_send(topology: Topology) -> None:
    for rank in range(topology.decode_tp):
        for row in routes(topology, rank):
            held = topology.target.on_rank(topology.prefill_tp, row.prefill_rank)
            assert set(row.target_heads) <= set(held)
            if topology.draft:
                held = topology.draft.on_rank(topology.prefill_tp, row.prefill_rank)
                assert set(row.draft_heads) <= set(held)


@given(topologies())
def test_one_sender_of_aux_and_answers_are_the_senders(topology: Topology) -> None:
    for rank in range(topology.decode_tp):
        table = routes(topology, rank)
        assert [r.stage for r in table if r.sends_aux] == [topology.last_stage]
        assert required_responses(table) == len({
            (r.prefill_rank, r.stage)
            for r in table
            if r.target_heads or r.draft_heads or r.sends_aux or r.sends_state
        })  # fmt: skip


def test_mla_with_mha_draft_by_hand() -> None:
    """P 4 -> D 2, two draft heads: each decode rank needs one head, its first sender has it."""
    table = routes(Topology(4, 2, Spread(Kind.MLA), Spread(Kind.MHA, 2)), 1)
    assert [(r.prefill_rank, r.is_send_target, list(r.draft_heads), r.is_dummy) for r in table] == [
        (2, True, [1], False),
        (3, False, [], True),
    ]


def test_draft_only_senders_by_hand() -> None:
    table = routes(Topology(4, 1, Spread(Kind.MLA), Spread(Kind.MHA, 4)), 0)
    assert [r.is_send_target for r in table] == [True, False, False, False]
    assert [list(r.draft_heads) for r in table] == [[0], [1], [2], [3]]
    assert required_responses(table) == 4


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(MixKVError, match="one divides the other"):
        contacted_ranks(3, 2, 0)
    with pytest.raises(MixKVError, match="KV heads"):
        heads_on_rank(6, 4, 0)


# ---------------------------------------------------------------- plans


def shard(spread: Spread, tp: int, rank: int, page_size: int, head: list[int], pages: int) -> Shard:
    items = tuple(w * page_size * len(spread.on_rank(tp, rank)) for w in head)
    return Shard(Component(spread, items, tuple(i * pages for i in items)), page_size, tp, rank)


def memory(part: Shard, pages: int, first: int) -> tuple[list[int], list[np.ndarray]]:
    """Fake addresses of the entries, and for each byte of them the (entry, head, byte) it holds."""
    bases, maps, address = [], [], first
    for entry, row in enumerate(part.rows):
        heads = np.repeat(np.arange(part.heads.start, part.heads.stop), row // len(part.heads))
        byte = np.tile(np.arange(row // len(part.heads)), len(part.heads))
        bases.append(address)
        maps.append(np.stack([np.full(row, entry), heads, byte], 1))
        address += row * part.page_size * pages + 64
    return bases, maps


@settings(max_examples=60, deadline=None)
@given(
    topologies().filter(lambda t: t.draft is not None),
    st.integers(1, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 9),
    st.data(),
)
def test_every_byte_of_a_chunk_is_written_once(
    topology: Topology, page_size: int, head: list[int], count: int, data: st.DataObject
) -> None:
    """Simulate the writes of all senders of one decode rank over labelled bytes."""
    spread, pages = topology.draft, 12
    assert spread is not None
    rank = data.draw(st.integers(0, topology.decode_tp - 1))
    src_pages = np.array(data.draw(st.permutations(range(pages)))[:count], np.int64)
    dst_pages = np.array(data.draw(st.permutations(range(pages)))[:count], np.int64)
    dst = shard(spread, topology.decode_tp, rank, page_size, head, pages)
    dst_bases, dst_maps = memory(dst, pages, 10_000)
    written: dict[int, tuple[int, ...]] = {}
    for row in routes(topology, rank):
        if not row.is_send_draft:
            continue
        src = shard(spread, topology.prefill_tp, row.prefill_rank, page_size, head, pages)
        src_bases, src_maps = memory(src, pages, 1_000_000)
        pairs = [(i, i) for i in range(len(head))]
        copies = component_copies(src_bases, src, dst_bases, dst, row.draft_heads, pairs)
        out = blocks(copies, page_size, src_pages, dst_pages)
        for s, d, n in zip(out.src, out.dst, out.length, strict=True):
            for k in range(n):
                assert d + k not in written
                written[d + k] = _label(src, src_bases, src_maps, s + k, pages, src_pages)
    expected = {}
    for entry, (base, row) in enumerate(zip(dst_bases, dst.rows, strict=True)):
        for order, page in enumerate(dst_pages):
            for slot in range(page_size):
                for k in range(row):
                    at = base + (page * page_size + slot) * row + k
                    expected[at] = (order, slot, *dst_maps[entry][k])
    assert written == expected


def _label(
    src: Shard, bases: list[int], maps: list[np.ndarray], at: int, pages: int, src_pages: np.ndarray
) -> tuple[int, ...]:
    """What the source byte at this address is: (page's place, slot, entry, head, byte)."""
    entry = max(i for i, base in enumerate(bases) if base <= at)
    token, byte = divmod(at - bases[entry], src.rows[entry])
    page, slot = divmod(token, src.page_size)
    assert page < pages
    return (src_pages.tolist().index(page), slot, *maps[entry][byte])


def test_runs_are_the_longest_possible() -> None:
    src = np.array([3, 4, 5, 9, 10, 2])
    dst = np.array([7, 8, 9, 1, 2, 3])
    first_src, first_dst, count = page_runs(src, dst)
    assert (first_src.tolist(), first_dst.tolist(), count.tolist()) == (
        [3, 9, 2],
        [7, 1, 3],
        [3, 2, 1],
    )


def test_plan_counts_bytes() -> None:
    spread = Spread(Kind.MHA, 4)
    src, dst = (shard(spread, tp, 0, 16, [8, 8], 4) for tp in (1, 2))
    copies = component_copies([0, 0], src, [0, 0], dst, range(2), [(0, 0), (1, 1)])
    plan = Plan(16, copies, (Reach(0, copies.at(0)), Reach(60, copies.at(1))), 4, 4)
    assert plan.target_bytes_per_page == plan.draft_bytes([1, 1]) == 2 * 2 * 8 * 16
    firsts = plan.firsts(10)
    assert firsts == (0, 5), "token 10 x 16 - 15 - 60 - 2 is in page 5"
    assert plan.draft_bytes(10 - first for first in firsts) == (10 + 5) * 2 * 8 * 16


def test_entries_by_window() -> None:
    layers = (99, 99, 0, 99)
    part = Component(Spread(Kind.MHA, 4), (64,) * 8, (640,) * 8, 2 * layers)
    assert part.by_window == {99: [0, 1, 3, 4, 5, 7], 0: [2, 6]}
    plain = Component(part.spread, part.item_lens, part.lens)
    assert plain.by_window == {0: [*range(8)]}
    assert Shard(part, 16, 2, 1).only([2, 6]).component.lens == (640, 640)


def test_heads_of_another_size_are_refused() -> None:
    spread = Spread(Kind.MHA, 4)
    src, dst = shard(spread, 1, 0, 16, [8], 4), shard(spread, 1, 0, 16, [4], 4)
    with pytest.raises(MixKVError, match="same --kv-cache-dtype"):
        component_copies([0], src, [0], dst, range(4), [(0, 0)])


@pytest.mark.parametrize(("item_len", "ok"), [(64, True), (63, False), (0, False)])
def test_entries_must_split_into_heads(item_len: int, ok: bool) -> None:
    part = Shard(Component(Spread(Kind.MHA, 2), (item_len,), (item_len * 3,)), 16, 1, 0)
    if ok:
        part.check("draft")
        assert part.pages == 3
    else:
        with pytest.raises(MixKVError, match="NHD"):
            part.check("draft")


def test_overlap_is_half_open() -> None:
    assert list(overlap(range(4), range(2, 9))) == [2, 3]
    assert not overlap(range(2), range(2, 4))
