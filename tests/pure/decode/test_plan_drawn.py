"""A decode rank's plan for drawn sizes, stages and slots, compared with a plain reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rig.channel.contacts import contacted

from sglang_mixkv.channel.handshake import Row, StagingFacts, Target
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode.plan import Plan, judge, make_plan
from sglang_mixkv.decode.transfer import peer_of
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.slot_format import SLOT_OVERHEAD
from sglang_mixkv.errors import MixKVError

SERVER, HOST = "10.0.0.9:8998", "10.0.0.1"
SIZES = [(p, d) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8)]


def row(name: str, facts: DraftFacts | None, tp: int, rank: int, **changed: Any) -> Row:
    """Make the row of a rank. `name` is also the rank's address."""
    plain = Row(
        PROTOCOL, "0.4.0", "0.5.23", name.encode().ljust(8), HOST, 9000, f"tcp://{name}", tp,
        rank, 0, (8, 8), "mooncake", Target(0, 61, layer_ids=False, even=True), 1,
        facts and DraftLayout(facts, tp, rank),
        facts and StagingFacts("mooncake", b"", 4096, 1 << 20, 16),
    )  # fmt: skip
    return replace(plain, **changed)


class Case(NamedTuple):
    facts: DraftFacts
    own: Row
    rows: list[Row]  # of the contacted ranks of all stages, in SGLang's order
    last: list[Row]  # of the contacted ranks of the last stage, which has the drafter


@st.composite
def cases(draw: st.DrawFn) -> Case:
    facts = DraftFacts("a", "EAGLE3", draw(st.sampled_from([1, 2, 4, 8])), (100, 156), "bfloat16")
    tp, own_tp = draw(st.sampled_from(SIZES))
    rank = draw(st.integers(0, own_tp - 1))
    slots, size = st.integers(2, 64), st.integers(SLOT_OVERHEAD, 1 << 13)
    staging = StagingFacts("mooncake", b"", 0, draw(size), draw(slots))
    own = row("own", facts, own_tp, rank, staging=staging)
    stages, rows = draw(st.integers(1, 3)), []
    for stage in range(stages):
        has = stage == stages - 1 or draw(st.booleans())
        for number in contacted(tp, own_tp, rank):
            there = StagingFacts("mooncake", b"", 0, draw(size), draw(slots))
            rows.append(row(
                f"{stage}.{number}", facts if has else None, tp, number, pp_rank=stage,
                staging=there if has else None, patience=draw(st.floats(0.1, 60)),
                protocol=(PROTOCOL[0], PROTOCOL[1] + draw(st.integers(0, 3))),
            ))  # fmt: skip
    last = [one for one in rows if one.pp_rank == stages - 1]
    return Case(facts, own, draw(st.permutations(rows)) if draw(st.booleans()) else rows, last)


def infos_of(rows: list[Row]) -> list[dict[str, Any]]:
    return [{"rank_ip": HOST, "rank_port": 9000 + n} for n, _ in enumerate(rows)]


def plan(own: Row, rows: list[Row], cold: str = "") -> Plan:
    table = {(HOST, 9000 + n): one for n, one in enumerate(rows)}
    return make_plan(infos_of(rows), table, own, cold, SERVER)


def held(one: Row) -> set[int]:
    return set(one.draft.heads) if one.draft else set()


@given(cases())
def test_each_head_is_read_once_from_the_last_stage(case: Case) -> None:
    in_order = [one for one in case.rows if one in case.last]
    if [held(one) for one in in_order] != [held(one) for one in case.last]:
        return  # SGLang contacts ranks in the order of their numbers
    made = plan(case.own, case.rows)
    assert [source.peer for source in made.sources] == [
        peer_of(one.instance, SERVER) for one in in_order
    ]
    missing = held(case.own)
    tp, own_tp = case.last[0].attn_tp, case.own.attn_tp
    for source, one in zip(made.sources, in_order, strict=True):
        mine = missing & held(one)
        missing -= mine
        assert set(source.heads) == mine
        size = min(one.staging.slot_bytes, case.own.staging.slot_bytes) - SLOT_OVERHEAD
        assert source.segment_tokens == (size // (256 * len(mine)) if mine else 0)
        assert (source.slots, source.patience) == (one.staging.slots, one.patience)
        assert source.readers == max(1, own_tp // tp)
    assert not missing
    assert (made.version, made.cold) == (PROTOCOL[1], "")


@settings(max_examples=30)
@given(cases())
def test_the_last_stage_is_opened_even_without_reads(case: Case) -> None:
    without = replace(case.own, draft=None, staging=None)
    for own, cold in ((case.own, "mismatch"), (without, ""), (without, "no_drafter")):
        made = plan(own, case.rows, cold)
        assert made.cold == cold
        assert {source.peer for source in made.sources} == {
            peer_of(one.instance, SERVER) for one in case.last
        }
        assert not any(source.heads or source.segment_tokens for source in made.sources)
        readers = max(1, case.own.attn_tp // case.last[0].attn_tp)
        assert {source.readers for source in made.sources} == {readers}


FACTS = DraftFacts("a", "EAGLE3", 4, (100, 156), "bfloat16")
OWN = row("own", FACTS, 1, 0)


@pytest.mark.parametrize("there", [(2, 4), (4, 4), (4, 9)])
def test_a_pair_uses_the_newest_version_of_all_ranks(
    there: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_mixkv.decode.plan.PROTOCOL", (2, 5))
    rows = [
        row("p0", None, 2, 0, protocol=(2, 7)), row("p1", FACTS, 1, 0, pp_rank=1, protocol=there),
    ]  # fmt: skip
    for some in (rows, rows[::-1]):
        assert plan(OWN, some).version == min(5, there[1])


def test_ranks_without_a_drafter_or_a_row() -> None:
    none = [row("p0", None, 1, 0)]
    assert plan(OWN, none, "no_drafter").sources == ()
    with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
        plan(OWN, none)
    with pytest.raises(MixKVError, match=r"MIXKV-PAIR-01.*10\.0\.0\.1:9000"):
        make_plan(infos_of(none), {}, OWN)


def test_nothing_is_read_without_slots_on_either_side() -> None:
    """A source without slots, or for a rank without slots, has no heads to read."""
    rows, none = [row("p0", FACTS, 2, 0), row("p1", FACTS, 2, 1)], {"staging": None}
    for own, there in ((OWN, [replace(rows[0], **none), rows[1]]), (replace(OWN, **none), rows)):
        sources = plan(own, there).sources
        assert list(sources[0].heads) == []
        assert (sources[0].slots, sources[0].segment_tokens) == (0, 0)
        assert {source.readers for source in sources} == {1}


OTHER = replace(FACTS, dtype="fp8_e4m3")
SHORTER, LONGER = {"aux_item_lens": (8, 7)}, {"aux_item_lens": (8, 9)}
P0, P1 = row("p0", FACTS, 2, 0), row("p1", FACTS, 2, 1)
EARLIER, LAST = row("p0", None, 1, 0), row("p1", FACTS, 1, 0, pp_rank=1)


@pytest.mark.parametrize(
    ("rows", "cold", "named"),
    [
        ([P0, P1], "", []),
        ([EARLIER, LAST], "", []),
        ([LAST, EARLIER], "", []),
        ([EARLIER], "no_drafter", ["drafter with KV heads"]),
        ([replace(P0, **SHORTER), replace(P1, **SHORTER)], "no_drafter", ["bytes of the metadata"]),
        ([replace(EARLIER, **SHORTER), LAST], "no_drafter", ["bytes of the metadata"]),
        ([row("p0", OTHER, 1, 0)], "mismatch", ["dtype"]),
        ([row("p0", OTHER, 1, 0, **SHORTER)], "mismatch", ["dtype", "bytes of the metadata"]),
        ([replace(P0, **SHORTER), row("p1", OTHER, 2, 1)], "mismatch",
         ["bytes of the metadata", "dtype"]),
        ([replace(P0, **SHORTER), replace(P1, **LONGER)], "refused", []),
    ],
)  # fmt: skip
def test_judge_compares_the_rows_of_a_server(rows: list[Row], cold: str, named: list[str]) -> None:
    for asked in (True, False):
        if cold == "refused" or (cold == "mismatch" and not asked):
            with pytest.raises(MixKVError, match="MIXKV-PAIR-03") as refused:
                judge(rows, OWN, serve_mismatch=asked)
            assert ("--mixkv-on-draft-mismatch cold" in str(refused.value)) == (cold != "refused")
        else:
            why, found = judge(rows, OWN, serve_mismatch=asked)
            assert why == cold
            assert len(found) == len(named)
            assert all(word in one.what for word, one in zip(named, found, strict=True))


def test_two_ranks_of_one_instance_are_refused() -> None:
    with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
        judge([P0, replace(P1, instance=P0.instance)], OWN, serve_mismatch=True)
    assert judge([], OWN, serve_mismatch=False) == ("", ())
