"""A decode rank's plan of what to read from a prefill server, or why it reads nothing."""

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
    """Rows of all ranks, or of these."""
    return [row(f"p{rank}", tp, rank, **more) for rank in ranks or range(tp)]


def plan(own: Row, *rows: Row, cold: bool = False) -> Plan:
    """Make a plan with these rows' ranks as the contacts, in order."""
    infos = [info(n) for n, _ in enumerate(rows)]
    table = {("10.0.0.1", n): row for n, row in enumerate(rows)}
    why, _ = judge(rows, own, serve_mismatch=cold)
    return make_plan(infos, table, own, why)


def info(port: int) -> dict[str, Any]:
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
         "small slots there", "small slots here", "no drafter here"],
)  # fmt: skip
def test_each_head_is_read_in_segments_that_fit_both_sides(own, rows, read, readers, tokens):
    """A rank from which nothing is read is still opened."""
    made = plan(own, *rows)
    assert heads(made) == read
    assert (made.cold, made.version) == ("", PROTOCOL[1])
    assert {(source.readers, source.slots) for source in made.sources} <= {(readers, 16), (1, 0)}
    assert [source.segment_tokens for source in made.sources] == tokens
    assert [source.peer for source in made.sources] == [one.instance for one in rows]


@pytest.mark.parametrize("first", [None, FACTS])
def test_of_several_stages_the_last_with_a_drafter_is_read(first):
    stages = [row("first", pp_rank=0, facts=first), row("last", pp_rank=1)]
    for rows in (stages, stages[::-1]):
        made = plan(row(), *rows)
        assert [source.peer for source in made.sources] == [b"last    "]
        assert (heads(made), made.cold) == ([[0, 1, 2, 3]], "")
        assert judge(rows, row(), serve_mismatch=False) == ("", ())


def test_a_pair_uses_the_newest_version_of_both(monkeypatch):
    monkeypatch.setattr("sglang_mixkv.decode.plan.PROTOCOL", (2, 5))
    rows = [row("p0", 2, 0, protocol=(1, 4)), row("p1", 2, 1, protocol=(3, 9))]
    assert plan(row(), *rows).version == 4


@pytest.mark.parametrize(("theirs", "ours"), [(4, 6), (6, 4), (3, 2)])
def test_a_server_of_unfit_size_is_refused_before_any_request(theirs, ours):
    """Otherwise each request would fail alone, and prefill would hold it until its timeout."""
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
    ids=["no drafter there", "no drafter at all", "fewer heads", "another dtype",
         "shorter metadata", "shorter metadata, no drafter", "shorter metadata, another dtype"],
)  # fmt: skip
def test_what_differs_is_cold_and_named_once(own, rows, cold, differences):
    """Another drafter only where the operator asked for it."""
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
    ids=["longer metadata", "longer metadata, no drafter here",
         "longer metadata of an earlier stage", "two ranks of one instance",
         "heads that no contact has", "sizes without a route"],
)  # fmt: skip
def test_what_would_do_harm_is_refused_always(code, words, own, rows):
    for cold in (False, True):
        with pytest.raises(MixKVError, match=f"(?s)MIXKV-PAIR-{code}.*{words}"):
            plan(own, *rows, cold=cold)


def test_another_drafter_is_refused_with_the_way_to_serve_it():
    with pytest.raises(MixKVError, match=r"(?s)PAIR-03.*fp8_e4m3.*--mixkv-on-draft-mismatch cold"):
        plan(row(), row("p", facts=FP8))


def test_a_contact_without_a_row_is_refused():
    with pytest.raises(MixKVError, match=r"(?s)MIXKV-PAIR-01.*10\.0\.0\.1:77"):
        make_plan([info(0), info(77)], {("10.0.0.1", 0): row("p")}, row())
