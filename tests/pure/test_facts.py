"""Rows that ranks publish, and what a difference between two of them means. Any other bytes than
rows: scripts/fuzz."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.draft.facts import (
    MAX_ROW_BYTES,
    NO_DRAFTER,
    Row,
    Severity,
    StagingFacts,
    Target,
    differences,
    read_row,
)
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.window import window_of

MLA, GQA = Target(0, 61, layer_ids=False, even=True), Target(8, 8, layer_ids=False, even=True)
ROW = Row(
    PROTOCOL, "0.3.0", "0.5.23", b"instance", "10.0.0.1", 9000, "tcp://10.0.0.1:9001", 2, 0, 0,
    (64, 128), "nixl", MLA, 1,
    DraftLayout(DraftFacts("LlamaEagle3", "EAGLE3", 8, (256, 256), "bfloat16"), 2, 0),
    StagingFacts("nixl", b"agent", 1 << 40, 1 << 20, 64),
)  # fmt: skip


def row(**changed: Any) -> Row:
    """A row with other fields, of its facts and its staging too."""
    facts, staging = ROW.draft.facts, ROW.staging
    for name in [n for n in changed if n in DraftFacts.__struct_fields__]:
        facts = replace(facts, **{name: changed.pop(name)})
    for name in [n for n in changed if n in StagingFacts.__struct_fields__]:
        staging = replace(staging, **{name: changed.pop(name)})
    return replace(ROW, **{"draft": DraftLayout(facts, 2, 0), "staging": staging, **changed})


ALIKE = {
    "plugin": "0.4.0", "instance": b"another_", "rank_ip": "10.0.0.2", "rank_port": 1,
    "address": "", "attn_tp": 4, "attn_tp_rank": 3, "pp_rank": 1, "base": 1, "slot_bytes": 99,
    "slots": 2, "endpoint": b"another",
}  # fmt: skip
OTHERS = [
    ("refused", {"data_plane": "mooncake"}, "data plane"),
    ("refused", {"staging": None}, "data plane"),
    ("mismatch", {"architecture": "Qwen3Eagle3"}, "drafter architecture"),
    ("mismatch", {"algorithm": "EAGLE"}, "speculative algorithm"),
    ("mismatch", {"total_heads": 4}, "KV heads of the drafter"),
    ("mismatch", {"head_bytes": (256, 128)}, "bytes per token and head of the drafter"),
    ("mismatch", {"head_bytes": (256,)}, "bytes per token and head of the drafter"),
    ("mismatch", {"dtype": "fp8_e4m3"}, "dtype of the drafter's KV"),
    ("mismatch", {"topk": 8}, "--speculative-eagle-topk"),
]  # whichever side has it
METADATA = {
    "refused": [(64, 129), (65, 1), (64, 128, 0), (64,), ()], "cold": [(64, 127), (0, 0)],
}  # fmt: skip
AUX, NONE = "bytes of the metadata rows", {"draft": None, "staging": None}
OLDER = {"engine": "0.5.22", "backend": "mooncake"}  # SGLang serves it before 0.5.23


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        *(({name: value}, {}, []) for name, value in ALIKE.items()),
        *((one, {}, [(kind, what)]) for kind, one, what in OTHERS),
        *(({}, one, [(kind, what)]) for kind, one, what in OTHERS),
        *(({"aux_item_lens": n}, {}, [(kind, AUX)]) for kind in METADATA for n in METADATA[kind]),
        (NONE, {}, [("cold", NO_DRAFTER)]),
        ({}, NONE, []),
        ({"backend": "mooncake"}, {}, [("refused", "transfer backend")]),
        ({"engine": "0.5.23+cu130"}, {}, []),
        ({"engine": "0.5.23.post1"}, {}, []),
        (OLDER, {"backend": "mooncake"}, []),
        ({"backend": "mooncake"}, OLDER, [("refused", "SGLang's release over mooncake")]),
        ({"engine": "0.5.22"}, {}, [("refused", "SGLang's release over nixl")]),
        ({"aux_item_lens": (64, 1), "dtype": "fp8"}, {},
         [("mismatch", "dtype of the drafter's KV"), ("cold", AUX)]),
        ({"aux_item_lens": (64, 129), "dtype": "fp8", "topk": 3}, {},
         [("refused", AUX), ("mismatch", "dtype of the drafter's KV"),
          ("mismatch", "--speculative-eagle-topk")]),
    ],
)  # fmt: skip
def test_what_two_rows_differ_in(prefill, decode, expected):
    """And how grave it is, the gravest first."""
    found = differences(row(**prefill), row(**decode))
    assert [(d.severity, d.what) for d in found] == expected
    for one in found:
        assert one.prefill != one.decode
        assert all((one.consequence, one.remedy))
    hurts = [one for one in found if "overwritten" in one.consequence]
    assert bool(hurts) == (("refused", AUX) in expected)


def fields(**changed: Any) -> bytes:
    """A row's JSON with other values, whatever they are."""
    return json.dumps(json.loads(msgspec.json.encode(ROW)) | changed).encode()


@pytest.mark.parametrize("written", [ROW, row(draft=None, staging=None)])
def test_a_row_survives_its_way(written):
    assert read_row(msgspec.json.encode(written)) == written


def test_what_a_later_release_adds_is_ignored():
    later = PROTOCOL[0], PROTOCOL[1] + 7
    assert read_row(fields(later={"more": [1, 2]})) == ROW
    assert read_row(fields(protocol=later)).protocol == later


@pytest.mark.parametrize("protocol", [(PROTOCOL[1] + 1, PROTOCOL[1] + 3), (0, PROTOCOL[0] - 1)])
def test_another_protocol_is_named_before_the_rest_is_read(protocol):
    data = json.dumps({"protocol": protocol, "all": "different"}).encode()
    with pytest.raises(ValueError, match=f"protocol {protocol[0]} to {protocol[1]}"):
        read_row(data)


JSON_BEYOND = [
    {"protocol": [1]}, {"protocol": "1"}, {"protocol": None}, {"instance": "c2hvcnQ="},
    {"rank_port": -1}, {"rank_port": 65536}, {"attn_tp": -1}, {"aux_item_lens": [-1]},
    {"aux_item_lens": [1] * 257}, {"plugin": "x" * 257}, {"topk": 1.5}, {"draft": {}},
    {"staging": {"data_plane": "nixl"}},
]  # fmt: skip
FIELDS_BEYOND = [
    {"total_heads": 0}, {"head_bytes": ()}, {"head_bytes": (0,)}, {"head_bytes": (1,) * 1025},
    {"slots": 1}, {"slot_bytes": 0}, {"base": -1},
    {"endpoint": b"x" * ((32 << 10) + 1)},
]  # fmt: skip
BEYOND = [fields(**one) for one in JSON_BEYOND]
BEYOND += [msgspec.json.encode(row(**one)) for one in FIELDS_BEYOND]


@pytest.mark.parametrize("data", BEYOND, ids=map(str, range(len(BEYOND))))
def test_rows_beyond_the_bounds_are_rejected(data):
    with pytest.raises(ValueError):  # noqa: PT011
        read_row(data)


def test_a_row_has_64_kib_at_most():
    assert read_row(fields().ljust(MAX_ROW_BYTES)) == ROW
    with pytest.raises(ValueError, match="a row of 65537 bytes"):
        read_row(fields().ljust(MAX_ROW_BYTES + 1))


def but(target: Target, **changed: Any) -> Target:
    return replace(target, **changed)


TWO, UNEVEN, ONE_HEAD = but(GQA, entries=4, stages=2), but(GQA, even=False), but(GQA, heads=1)
DCP, SHORT, NUMBERED = but(MLA, dcp=2), but(TWO, entries=2), but(TWO, entries=2, layer_ids=True)


@pytest.mark.parametrize(
    ("target", "tp", "backend", "what"),
    [
        *((target, tp, backend, None) for target in (MLA, but(MLA, stages=2), GQA)
          for tp in (1, 2, 4) for backend in ("mooncake", "nixl")),
        (DCP, 4, "mooncake", "DCP"),
        (DCP, 2, "mooncake", None),
        (UNEVEN, 1, "mooncake", "different widths"),
        (UNEVEN, 2, "nixl", None),
        (ONE_HEAD, 4, "nixl", "1 KV heads over NIXL"),
        (ONE_HEAD, 1, "nixl", None),
        (ONE_HEAD, 4, "mooncake", None),
        (TWO, 2, "nixl", "stages of a target with KV heads"),
        (TWO, 2, "mooncake", None),
        (TWO, 4, "nixl", None),
        (but(TWO, layer_ids=True), 2, "nixl", None),
        (SHORT, 2, "mooncake", "different lengths"),
        (NUMBERED, 4, "nixl", "different lengths"),
        (NUMBERED, 4, "mooncake", None),
    ],
)  # fmt: skip
def test_a_target_is_served_where_sglang_moves_it(target, tp, backend, what):
    """From a prefill of attention TP 2."""
    decode = row(attn_tp=tp, target=MLA if target.is_mla else GQA, backend=backend)
    found = differences(row(attn_tp=2, target=target, backend=backend), decode)
    assert all(one.severity is Severity.REFUSED for one in found)
    assert any(what in one.what for one in found) if what else found == []


def test_the_remedy_for_a_mix_names_what_is_served():
    sides = (row(engine=engine, backend="mooncake") for engine in ("0.5.22", "0.6.0"))
    (found,) = differences(*sides)
    assert found.remedy == "Install 0.6.0 on prefill, or 0.5.23 on decode"


@pytest.mark.parametrize(("sliding", "window"), [(2048, 2047), (1, None), (0, None), (None, None)])
def test_a_block_drafter_reads_the_window_of_its_config(sliding, window):
    """SGLang takes one token, or none, for no window. Some configs have no such field."""
    text = SimpleNamespace(layer_types=["sliding_attention"] * 3)
    if sliding is not None:
        text.sliding_window = sliding
    config = SimpleNamespace(architectures=["LingDSparkModel"], get_text_config=lambda: text)
    flags = SimpleNamespace(
        speculative_draft_window_size=None, speculative_draft_attention_backend="fa3",
        disaggregation_decode_enable_radix_cache=False, speculative_draft_sink_size=0,
        speculative_algorithm="DSPARK", prefill_attention_backend=None,
        decode_attention_backend=None, attention_backend=None, speculative_eagle_topk=1,
    )  # fmt: skip
    assert window_of(flags, config) == window
