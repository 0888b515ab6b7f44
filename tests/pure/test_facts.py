"""Rows that ranks publish, and what a difference between two of them means."""

from __future__ import annotations

import contextlib
import itertools
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.draft.facts import (
    MAX_ROW_BYTES,
    MIXES,
    Row,
    Severity,
    StagingFacts,
    Target,
    differences,
    read_row,
)
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.window import window_of
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG

FACTS = DraftFacts("LlamaEagle3", "EAGLE3", 8, (256, 256), "bfloat16")
STAGING = StagingFacts("nixl", b"agent", 1 << 40, 1 << 20, 64)
MLA = Target(0, 61, layer_ids=False, even=True)
ROW = Row(
    PROTOCOL, "0.3.0", "0.5.23", b"instance", "10.0.0.1", 9000, "tcp://10.0.0.1:9001", 2, 0, 0,
    (64, 128), "nixl", MLA, 1, DraftLayout(FACTS, 2, 0), STAGING,
)  # fmt: skip
ALIKE = {"plugin": "0.4.0", "instance": b"another_", "rank_ip": "10.0.0.2",
         "rank_port": 1, "address": "", "attn_tp": 4, "attn_tp_rank": 3, "pp_rank": 1}  # fmt: skip


def row(**changed: Any) -> Row:
    """A row with other fields, of its facts and its staging too."""
    facts, staging = ROW.draft.facts, ROW.staging
    for name in [n for n in changed if n in DraftFacts.__struct_fields__]:
        facts = msgspec.structs.replace(facts, **{name: changed.pop(name)})
    for name in [n for n in changed if n in StagingFacts.__struct_fields__]:
        staging = msgspec.structs.replace(staging, **{name: changed.pop(name)})
    changed = {"draft": DraftLayout(facts, 2, 0), "staging": staging} | changed
    return msgspec.structs.replace(ROW, **changed)


def only(prefill: Row, decode: Row) -> Any:
    found = differences(prefill, decode)
    assert len(found) == 1, found
    return found[0]


SLOTS = {"base": 1, "slot_bytes": 99, "slots": 2, "device": 0, "endpoint": b"another"}


@pytest.mark.parametrize(("name", "value"), [("topk", ROW.topk), *ALIKE.items(), *SLOTS.items()])
def test_what_cannot_hurt_is_not_compared(name, value):
    assert differences(row(**{name: value}), ROW) == []


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("architecture", "Qwen3Eagle3", "drafter architecture"),
        ("algorithm", "EAGLE", "speculative algorithm"),
        ("total_heads", 4, "KV heads of the drafter"),
        ("head_bytes", (256, 128), "bytes per token and head"),
        ("head_bytes", (256,), "bytes per token and head"),
        ("dtype", "fp8_e4m3", "dtype"),
        ("topk", 8, "--speculative-eagle-topk"),
    ],
)
def test_another_drafter_is_a_mismatch(name, value, what):
    for prefill, decode in [(row(**{name: value}), ROW), (ROW, row(**{name: value}))]:
        found = only(prefill, decode)
        assert found.severity is Severity.MISMATCH
        assert what in found.what
        assert found.prefill != found.decode


@pytest.mark.parametrize("other", [row(data_plane="mooncake"), row(staging=None)])
def test_another_data_plane_is_refused_since_nothing_can_be_read(other):
    for prefill, decode in [(other, ROW), (ROW, other)]:
        found = only(prefill, decode)
        assert (found.severity, found.what) == (Severity.REFUSED, "data plane")


@pytest.mark.parametrize(
    ("prefill", "severity"),
    [
        ((64, 129), Severity.REFUSED),
        ((65, 1), Severity.REFUSED),
        ((64, 128, 0), Severity.REFUSED),
        ((64,), Severity.REFUSED),
        ((), Severity.REFUSED),
        ((64, 127), Severity.COLD),
        ((0, 0), Severity.COLD),
    ],
)
def test_metadata_rows_longer_on_prefill_are_refused_and_shorter_ones_cold(prefill, severity):
    found = only(row(aux_item_lens=prefill), ROW)
    assert found.severity is severity
    assert found.prefill == str(list(prefill))
    hurts = "overwritten" in found.consequence
    assert hurts == (severity is Severity.REFUSED)


def test_a_prefill_without_a_drafter_is_cold_and_a_decode_without_one_misses_nothing():
    without = row(draft=None, staging=None)
    assert only(without, ROW).severity is Severity.COLD
    assert differences(ROW, without) == []


def test_the_gravest_difference_comes_first():
    found = differences(row(aux_item_lens=(64, 129), dtype="fp8", topk=3), ROW)
    assert [d.severity for d in found] == [Severity.REFUSED, *[Severity.MISMATCH] * 2]
    found = differences(row(aux_item_lens=(64, 1), dtype="fp8"), ROW)
    assert [d.severity for d in found] == [Severity.MISMATCH, Severity.COLD]


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
    {"slots": 1}, {"slot_bytes": 0}, {"base": -1}, {"device": -2},
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


@pytest.mark.parametrize("name", ["protocol", "target", "later"])
def test_a_row_that_is_nested_too_deeply_is_rejected(name):
    with pytest.raises(ValueError):  # noqa: PT011
        read_row(fields(**{name: "deep"}).replace(b'"deep"', b"[" * 3000 + b"]" * 3000))


@given(
    st.binary(max_size=100)
    | st.builds(lambda n, b: fields()[:n] + b, st.integers(0, 700), st.binary(max_size=4))
)
def test_any_bytes_are_a_row_or_a_value_error(data):
    with contextlib.suppress(ValueError):
        assert isinstance(read_row(data), Row)


GQA = Target(8, 8, layer_ids=False, even=True)
TWO_STAGES = Target(8, 4, layer_ids=False, even=True, stages=2)


def kinds(target: Target, wanted: Target = GQA, tp: int = 2, backend: str = "mooncake") -> list:
    prefill = row(attn_tp=2, target=target, backend=backend)
    found = differences(prefill, row(attn_tp=tp, target=wanted, backend=backend))
    assert all(difference.severity is Severity.REFUSED for difference in found)
    return [difference.what for difference in found]


def but(target: Target, **changed: Any) -> Target:
    return msgspec.structs.replace(target, **changed)


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("target", [MLA, but(MLA, stages=2), GQA])
def test_what_sglang_moves_is_served(target, tp, backend):
    assert kinds(target, but(target, stages=1), tp, backend) == []


@pytest.mark.parametrize(
    ("target", "tp", "backend", "what"),
    [
        (but(MLA, dcp=2), 4, "mooncake", "DCP"),
        (but(MLA, dcp=2), 2, "mooncake", None),
        (but(GQA, even=False), 1, "mooncake", "different widths"),
        (but(GQA, even=False), 2, "nixl", None),
        (but(GQA, heads=1), 4, "nixl", "1 KV heads over NIXL"),
        (but(GQA, heads=1), 1, "nixl", None),
        (but(GQA, heads=1), 4, "mooncake", None),
        (TWO_STAGES, 2, "nixl", "stages of a target with KV heads"),
        (TWO_STAGES, 2, "mooncake", None),
        (TWO_STAGES, 4, "nixl", None),
        (but(TWO_STAGES, layer_ids=True), 2, "nixl", None),
        (but(TWO_STAGES, entries=2), 2, "mooncake", "different lengths"),
        (but(TWO_STAGES, entries=2, layer_ids=True), 4, "nixl", "different lengths"),
        (but(TWO_STAGES, entries=2, layer_ids=True), 4, "mooncake", None),
    ],
)
def test_what_sglang_does_not_move_is_refused_and_what_it_moves_beside_it_served(
    target, tp, backend, what
):
    found = kinds(target, MLA if target.is_mla else GQA, tp, backend)
    assert any(what in one for one in found) if what else found == []


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize(("prefill", "decode"), itertools.product(SUPPORTED_SGLANG, repeat=2))
def test_a_mix_of_releases_is_served_where_sglang_serves_it(prefill, decode, backend):
    sides = (row(engine=one, backend=backend) for one in (prefill, decode))
    found = differences(*sides)
    if prefill == decode or (prefill, decode) in MIXES[backend]:
        assert found == []
    else:
        assert [d.severity for d in found] == [Severity.REFUSED]
        assert (found[0].prefill, found[0].decode) == (prefill, decode)


@pytest.mark.parametrize("build", ["0.5.23+cu130", "0.5.23.post1"])
def test_builds_of_one_release_are_served(build):
    assert differences(row(engine=build), row(engine="0.5.23")) == []


def test_a_mix_with_an_unknown_release_is_refused_and_the_remedy_fits():
    found = only(row(engine="0.5.22", backend="mooncake"), row(engine="0.6.0", backend="mooncake"))
    assert found.remedy == "Install 0.6.0 on prefill, or 0.5.23 on decode"


def test_another_transfer_backend_is_refused():
    found = differences(row(backend="mooncake"), row(backend="nixl"))
    assert [difference.what for difference in found] == ["transfer backend"]


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
