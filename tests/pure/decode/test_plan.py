"""A decode rank's plan: the heads to read from each prefill rank, or the reason to read nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rig.channel import servers

from sglang_mixkv.channel.handshake import Row, StagingFacts
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode.plan import Plan, judge, make_plan
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.slot_format import SLOT_OVERHEAD
from sglang_mixkv.errors import MixKVError

FACTS = DraftFacts("LlamaEagle3", "EAGLE3", 4, (100, 156), "bfloat16")
FP8, FEWER, ODD = (
    msgspec.structs.replace(FACTS, **changed)
    for changed in ({"dtype": "fp8_e4m3"}, {"total_heads": 2}, {"total_heads": 6})
)
SLOT = SLOT_OVERHEAD + 1024  # four tokens of one head


def row(
    name: str = "own", tp: int = 1, rank: int = 0, *, facts: DraftFacts | None = FACTS,
    slot_bytes: int = SLOT, **changed: Any,
) -> Row:  # fmt: skip
    plain = servers.row(name.encode().ljust(8), "", StagingFacts("nixl", b"", 4096, slot_bytes, 16))
    if facts is None:
        changed["staging"] = None
    return msgspec.structs.replace(
        plain, rank_ip="10.0.0.1", attn_tp=tp, attn_tp_rank=rank,
        draft=facts and DraftLayout(facts, tp, rank), **changed,
    )  # fmt: skip


def prefill(tp: int, ranks: Any = None, **more: Any) -> list[Row]:
    """Return the rows of all prefill ranks, or of those in `ranks`."""
    return [row(f"p{rank}", tp, rank, **more) for rank in ranks or range(tp)]


def plan(own: Row, *rows: Row, cold: bool = False) -> Plan:
    """Make a plan that contacts the ranks of these rows, in this order."""
    infos = [info(n) for n, _ in enumerate(rows)]
    table = {("10.0.0.1", n): row for n, row in enumerate(rows)}
    why, _ = judge(rows, own, serve_mismatch=cold)
    return make_plan(infos, table, own, why)


def info(port: Any) -> dict[str, Any]:
    return {"rank_ip": "10.0.0.1", "rank_port": port}


def heads(made: Plan) -> list[list[int]]:
    return [list(source.heads) for source in made.sources]


SMALL = SLOT_OVERHEAD + 512


@pytest.mark.parametrize(
    ("own", "rows", "read", "readers", "tokens"),
    [
        (row(), prefill(1), [[0, 1, 2, 3]], 1, [1]),
        (row(), prefill(4), [[0], [1], [2], [3]], 1, [4] * 4),
        (row("own", 4, 2), prefill(2, [1]), [[2]], 2, [4]),
        (row(), prefill(8), [[0], [], [1], [], [2], [], [3], []], 1, [4, 0] * 4),
        (row(), prefill(4, slot_bytes=SMALL), [[0], [1], [2], [3]], 1, [2] * 4),
        (row(slot_bytes=SMALL), prefill(4), [[0], [1], [2], [3]], 1, [2] * 4),
        (row(facts=None), prefill(2), [[], []], 1, [0, 0]),
    ],
    ids=["equal", "more prefill ranks", "more decode ranks", "replicated heads",
         "small slots on prefill", "small slots on decode", "no drafter on decode"],
)  # fmt: skip
def test_segments_fit_the_slots_of_both_sides(own, rows, read, readers, tokens):
    """Each head is read once, in segments that fit a slot of either side.

    A source without heads to read is still part of the plan.
    """
    made = plan(own, *rows)
    assert heads(made) == read
    assert (made.cold, made.version) == ("", PROTOCOL[1])
    assert {(source.readers, source.slots) for source in made.sources} <= {(readers, 16), (1, 0)}
    assert [source.segment_tokens for source in made.sources] == tokens
    assert [source.peer for source in made.sources] == [one.instance for one in rows]


@pytest.mark.parametrize("first", [None, FACTS])
def test_the_last_stage_with_a_drafter_is_read(first):
    stages = [row("first", pp_rank=0, facts=first), row("last", pp_rank=1)]
    for rows in (stages, stages[::-1]):
        made = plan(row(), *rows)
        assert [source.peer for source in made.sources] == [b"last    "]
        assert (heads(made), made.cold) == ([[0, 1, 2, 3]], "")
        assert judge(rows, row(), serve_mismatch=False) == ("", ())


def test_a_pair_uses_the_newest_common_version(monkeypatch):
    monkeypatch.setattr("sglang_mixkv.decode.plan.PROTOCOL", (2, 5))
    rows = [row("p0", 2, 0, protocol=(1, 4)), row("p1", 2, 1, protocol=(3, 9))]
    assert plan(row(), *rows).version == 4


@pytest.mark.parametrize(("theirs", "ours"), [(4, 6), (6, 4), (3, 2)])
def test_a_server_whose_size_does_not_fit_is_refused(theirs, ours):
    """A server whose size does not fit is refused as a whole.

    Otherwise each request would fail separately, after prefill had held it until its time-out.
    """
    with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
        judge(prefill(theirs, facts=None), row(tp=ours, facts=None), serve_mismatch=True)


SHORTER = (8, 7)


@pytest.mark.parametrize(
    ("own", "rows", "cold", "differences"),
    [
        (row(), prefill(1, facts=None), "no_drafter", 1),
        (row(facts=None), prefill(1, facts=None), "", 0),
        (row(), prefill(1, facts=FEWER), "mismatch", 1),
        (row(), prefill(4, facts=FP8), "mismatch", 1),
        (row(), prefill(1, aux_item_lens=SHORTER), "no_drafter", 1),
        (row(), prefill(1, facts=None, aux_item_lens=SHORTER), "no_drafter", 2),
        (row(), prefill(1, facts=FP8, aux_item_lens=SHORTER), "mismatch", 2),
    ],
    ids=["no drafter on prefill", "no drafter on either side", "fewer heads", "another dtype",
         "shorter metadata", "shorter metadata, no drafter", "shorter metadata, another dtype"],
)  # fmt: skip
def test_pairs_with_differences_are_served_cold(own, rows, cold, differences):
    """A pair with differences is served cold, and each difference is named once.

    A pair with different drafters is served cold only if the operator has asked for that.
    """
    for asked in (True,) if cold == "mismatch" else (False, True):
        why, named = judge(rows, own, serve_mismatch=asked)
        assert (why, len(named)) == (cold, differences)
        assert not any(heads(plan(own, *rows, cold=asked)))


LONGER = (8, 9)


@pytest.mark.parametrize(
    ("code", "words", "own", "rows"),
    [
        ("03", "overwritten", row(), prefill(1, aux_item_lens=LONGER)),
        ("03", "overwritten", row(facts=None), prefill(1, aux_item_lens=LONGER)),
        ("03", "overwritten", row(),
         [row("p", facts=None, aux_item_lens=LONGER), row("last", pp_rank=1)]),
        ("04", "an instance", row(), [row("p", 2, 0), row("p", 2, 1)]),
        ("04", "", row(), prefill(2, [0])),
        ("04", "", row("own", 2, 0, facts=ODD), prefill(3, [0], facts=ODD)),
    ],
    ids=["longer metadata", "longer metadata, no drafter on decode",
         "longer metadata of an earlier stage", "two ranks of one instance",
         "heads that no contacted rank has", "sizes without a route"],
)  # fmt: skip
def test_harmful_differences_are_always_refused(code, words, own, rows):
    for cold in (False, True):
        with pytest.raises(MixKVError, match=f"(?s)MIXKV-PAIR-{code}.*{words}"):
            plan(own, *rows, cold=cold)


def test_the_refusal_of_another_drafter_names_the_flag():
    with pytest.raises(MixKVError, match=r"(?s)PAIR-03.*fp8_e4m3.*--mixkv-on-draft-mismatch cold"):
        plan(row(), row("p", facts=FP8))


@pytest.mark.parametrize("port", [77, "0x77", "7.7", "", "nowhere"])
def test_a_contacted_rank_without_a_row_is_refused(port: Any):
    """The rank's port comes from the server's `GET /route`. ZMQ reads its leading digits, so SGLang
    connects to a hostile server's `0x77` or `7.7`; the scheduler must survive that."""
    with pytest.raises(MixKVError, match=rf"(?s)MIXKV-PAIR-01.*10\.0\.0\.1:{port}"):
        make_plan([info(0), info(port)], {("10.0.0.1", 0): row("p")}, row())
