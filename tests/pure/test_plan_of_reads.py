"""What a decode rank plans to read from a prefill server, or why it does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode.plan import Contact, Plan, make_plan
from sglang_mixkv.draft.facts import Row, StagingFacts
from sglang_mixkv.draft.layout import SLOT_OVERHEAD, DraftFacts, DraftLayout
from sglang_mixkv.draft.targets import Target
from sglang_mixkv.errors import MixKVError

FACTS = DraftFacts("LlamaEagle3", "EAGLE3", 4, (100, 156), "bfloat16")
SLOT = SLOT_OVERHEAD + 1024  # four tokens of one head
AUX = (64, 128)


def row(
    name: str = "own",
    tp: int = 1,
    rank: int = 0,
    *,
    stage: int = 0,
    facts: DraftFacts | None = FACTS,
    slot_bytes: int = SLOT,
    **changed: Any,
) -> Row:
    draft = facts and DraftLayout(facts, tp, rank)
    staging = StagingFacts("nixl", b"", 4096, slot_bytes, 16) if facts else None
    made = Row(
        PROTOCOL, "0.3.0", "0.5.23", name.encode().ljust(8), "10.0.0.1", 9000, "", tp, rank, stage,
        AUX, "nixl", Target(0, 61, layer_ids=False, even=True), 1, draft, staging,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def plan(own: Row, *rows: Row, targets: tuple[bool, ...] = (), cold: bool = False) -> Plan:
    """With these rows' ranks as the contacts, in order."""
    contacts = [Contact("10.0.0.1", n, targets[n] if targets else True) for n, _ in enumerate(rows)]
    table = {("10.0.0.1", n): row for n, row in enumerate(rows)}
    return make_plan(contacts, table, own, serve_mismatch=cold)


def refused(code: str, own: Row, *rows: Row, cold: bool = False) -> str:
    with pytest.raises(MixKVError, match=code) as caught:
        plan(own, *rows, cold=cold)
    return str(caught.value)


def heads(made: Plan) -> list[list[int]]:
    return [list(source.heads) for source in made.sources]


def test_equal_sides_read_all_heads_from_one_rank():
    made = plan(row(), row("prefill"))
    assert heads(made) == [[0, 1, 2, 3]]
    assert (made.cold, made.differences, made.version) == ("", (), PROTOCOL[1])
    source = made.sources[0]
    assert (source.peer, source.readers, source.slots) == (b"prefill ", 1, 16)
    assert source.segment_tokens == 1
    assert made.rows[0].instance == b"prefill "


def test_more_prefill_ranks_each_give_their_heads():
    made = plan(row(), *[row(f"p{rank}", 4, rank) for rank in range(4)])
    assert heads(made) == [[0], [1], [2], [3]]
    assert [source.segment_tokens for source in made.sources] == [4] * 4
    assert [source.readers for source in made.sources] == [1] * 4


def test_more_decode_ranks_share_one_prefill_rank():
    made = plan(row("own", 4, 2), row("p", 2, 1))
    assert heads(made) == [[2]]
    assert made.sources[0].readers == 2


def test_a_rank_with_replicated_heads_is_opened_with_none():
    made = plan(row(), *[row(f"p{rank}", 8, rank) for rank in range(8)])
    assert heads(made) == [[0], [], [1], [], [2], [], [3], []]
    assert [source.segment_tokens for source in made.sources] == [4, 0] * 4


def test_the_smaller_slot_limits_a_segment():
    small = SLOT_OVERHEAD + 512
    prefill = [row(f"p{rank}", 4, rank, slot_bytes=small) for rank in range(4)]
    assert plan(row(), *prefill).sources[0].segment_tokens == 2
    prefill = [row(f"p{rank}", 4, rank) for rank in range(4)]
    assert plan(row(slot_bytes=small), *prefill).sources[0].segment_tokens == 2


def test_who_sends_the_target_is_sglang_s_choice():
    made = plan(row(), row("p0", 2, 0), row("p1", 2, 1), targets=(True, False))
    assert [source.is_send_target for source in made.sources] == [True, False]
    assert heads(made) == [[0, 1], [2, 3]]


def test_only_the_last_stage_has_a_drafter():
    stages = [row("first", stage=0, facts=None), row("last", stage=1)]
    for rows in (stages, stages[::-1]):
        made = plan(row(), *rows)
        assert [source.peer for source in made.sources] == [b"last    "]
        assert heads(made) == [[0, 1, 2, 3]]
        assert (made.cold, made.differences) == ("", ())


def test_of_several_stages_with_a_drafter_the_last_is_read():
    made = plan(row(), row("first", stage=0), row("last", stage=1))
    assert [source.peer for source in made.sources] == [b"last    "]


def test_two_ranks_of_one_instance_are_refused():
    """They would be one peer, and the room warm without the first one's heads."""
    assert "an instance" in refused("MIXKV-PAIR-04", row(), row("p", 2, 0), row("p", 2, 1))


def test_a_contact_without_a_row_is_refused():
    contacts = [Contact("10.0.0.1", 0, True), Contact("10.0.0.9", 77, True)]
    with pytest.raises(MixKVError, match="MIXKV-PAIR-01") as caught:
        make_plan(contacts, {("10.0.0.1", 0): row("p")}, row(), serve_mismatch=True)
    assert "10.0.0.9:77" in str(caught.value)


def test_a_prefill_without_a_drafter_is_served_cold():
    made = plan(row(), row("p", facts=None))
    assert (made.sources, made.cold) == ((), "no_drafter")
    assert len(made.differences) == 1


def test_a_decode_without_a_drafter_opens_all_ranks_and_reads_nothing():
    made = plan(row(facts=None), row("p0", 2, 0), row("p1", 2, 1))
    assert heads(made) == [[], []]
    assert made.cold == ""


def test_neither_side_has_a_drafter():
    made = plan(row(facts=None), row("p", facts=None))
    assert (made.sources, made.cold, made.differences) == ((), "", ())


def test_another_drafter_is_refused_with_the_way_to_serve_it():
    other = msgspec.structs.replace(FACTS, dtype="fp8_e4m3")
    text = refused("MIXKV-PAIR-03", row(), row("p", facts=other))
    assert "--mixkv-on-draft-mismatch cold" in text
    assert "fp8_e4m3" in text


def test_another_drafter_is_cold_where_the_operator_asked_for_it():
    other = msgspec.structs.replace(FACTS, total_heads=2)
    made = plan(row(), row("p", facts=other), cold=True)
    assert (made.cold, heads(made)) == ("mismatch", [[]])
    assert len(made.differences) == 1
    assert plan(row(), row("p"), cold=True).cold == ""


def test_heads_that_no_contact_has_are_refused():
    refused("MIXKV-PAIR-04", row(), row("p0", 2, 0))


def test_tp_sizes_without_a_route_are_refused():
    facts = msgspec.structs.replace(FACTS, total_heads=6)
    refused("MIXKV-PAIR-04", row("own", 2, 0, facts=facts), row("p0", 3, 0, facts=facts))


@pytest.mark.parametrize("cold", [False, True])
def test_longer_metadata_rows_on_prefill_are_refused_always(cold):
    longer = row("p", aux_item_lens=(64, 129))
    text = refused("MIXKV-PAIR-03", row(), longer, cold=cold)
    assert "overwritten" in text
    refused("MIXKV-PAIR-03", row(facts=None), longer, cold=cold)


@pytest.mark.parametrize("prefill_facts", [FACTS, None])
def test_shorter_metadata_rows_on_prefill_are_cold(prefill_facts):
    made = plan(row(), row("p", facts=prefill_facts, aux_item_lens=(64, 1)))
    assert made.cold
    assert not any(heads(made))


def test_longer_metadata_rows_of_an_earlier_stage_are_refused():
    first = row("first", facts=None, aux_item_lens=(999, 999))
    refused("MIXKV-PAIR-03", row(), first, row("last", stage=1))


@pytest.mark.parametrize("protocol", [(PROTOCOL[1] + 1, PROTOCOL[1] + 2), (0, PROTOCOL[0] - 1)])
def test_a_server_of_another_protocol_is_refused(protocol):
    refused("MIXKV-PAIR-02", row(), row("p", protocol=protocol))
    refused("MIXKV-PAIR-02", row(), row("p0", 2, 0), row("p1", 2, 1, protocol=protocol))


def test_a_pair_uses_the_newest_version_of_both(monkeypatch):
    monkeypatch.setattr("sglang_mixkv.decode.plan.PROTOCOL", (2, 5))
    rows = [row("p0", 2, 0, protocol=(1, 4)), row("p1", 2, 1, protocol=(3, 9))]
    assert plan(row(), *rows).version == 4


def test_no_contacts_are_refused():
    refused("MIXKV-PAIR-02", row())


def test_a_difference_of_many_ranks_is_named_once():
    other = msgspec.structs.replace(FACTS, dtype="fp8_e4m3")
    rows = [row(f"p{rank}", 4, rank, facts=other) for rank in range(4)]
    assert len(plan(row(), *rows, cold=True).differences) == 1
