"""The registration's extension: round trip, and a reason for everything else."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol import extension as wire
from sglang_mixkv.protocol.facts import DraftFacts, Facts, differences, draft_differences

FACTS = Facts(
    plugin="0.1.0", engine="0.5.23", page_size=64, kv_cache_dtype="bf16", aux_item_lens=(64, 8),
    speculative_algorithm="EAGLE3", topk=1, steps=3,
    draft=DraftFacts("mha", "LlamaForCausalLMEagle3", 8, (256, 256)),
)  # fmt: skip
ROUTE = wire.RouteNotice(True, wire.HeadRange(0, 1), wire.HeadRange(2, 4), True, True)
SAMPLE = wire.Registration(FACTS, 2, "mha", 4, 8, (1024, 1024), ROUTE)
STOCK = [b"x"] * wire.STOCK_REGISTRATION_FRAMES


def test_round_trip() -> None:
    assert wire.decode([*STOCK, wire.encode(SAMPLE)]) == SAMPLE


def test_without_the_extension_the_reason_names_the_plugin() -> None:
    with pytest.raises(MixKVError, match="does not run sglang-mixkv"):
        wire.decode(STOCK)


def test_another_protocol_is_named_before_its_schema_is_read() -> None:
    frame = wire.MAGIC + struct.pack(">H", wire.PROTOCOL + 1) + b"\xff not msgpack"
    with pytest.raises(MixKVError, match=f"protocol {wire.PROTOCOL + 1}"):
        wire.decode([*STOCK, frame])


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda b: wire.encode(SAMPLE)[:7] + b))
def test_any_bytes_end_in_a_reason(frame: bytes) -> None:
    with pytest.raises(MixKVError):
        wire.decode([*STOCK, frame])


@given(st.data())
def test_cut_short_ends_in_a_reason(data: st.DataObject) -> None:
    whole = wire.encode(SAMPLE)
    with pytest.raises(MixKVError):
        wire.decode([*STOCK, whole[: data.draw(st.integers(0, len(whole) - 1))]])


@given(st.lists(st.binary(max_size=8), max_size=30).filter(lambda f: len(f) != 21))
def test_another_number_of_frames_ends_in_a_reason(frames: list[bytes]) -> None:
    with pytest.raises(MixKVError):
        wire.decode(frames)


def test_too_large_is_refused() -> None:
    with pytest.raises(MixKVError):
        wire.decode_extension(wire.encode(SAMPLE) + b"\0" * wire.MAX_EXTENSION)


# ---------------------------------------------------------------- facts

CHANGES = {
    "engine": "0.5.24",
    "page_size": 1,
    "kv_cache_dtype": "fp8_e4m3",
    "speculative_algorithm": "EAGLE",
    "topk": 4,
    "state_types": ("mamba",),
    "aux_item_lens": (64,),
}
DRAFT_CHANGES = {
    "kind": "mla",
    "architecture": "Other",
    "total_heads": 4,
    "head_bytes": (128, 128),
    "window": 512,
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_difference_is_one_sentence(name: str) -> None:
    other = msgspec.structs.replace(FACTS, **{name: CHANGES[name]})
    (sentence,) = differences(FACTS, other)
    assert "prefill has" in sentence
    assert "decode has" in sentence
    assert str(CHANGES[name]) in sentence


@pytest.mark.parametrize("name", DRAFT_CHANGES)
def test_each_draft_difference_is_one_sentence(name: str) -> None:
    draft = msgspec.structs.replace(FACTS.draft, **{name: DRAFT_CHANGES[name]})
    other = msgspec.structs.replace(FACTS, draft=draft)
    (sentence,) = differences(FACTS, other)
    assert draft_differences(FACTS, other) == [sentence]
    assert str(DRAFT_CHANGES[name]) in sentence


def test_every_field_is_compared_or_excused() -> None:
    excused = {"plugin", "steps", "draft", "draft_aux"}
    assert set(CHANGES) | excused == set(msgspec.structs.asdict(FACTS))
    assert set(DRAFT_CHANGES) == set(msgspec.structs.asdict(FACTS.draft))


def test_what_cannot_hurt_is_not_refused() -> None:
    assert differences(FACTS, msgspec.structs.replace(FACTS, plugin="0.2.0", steps=5)) == []


def test_drafter_on_one_side() -> None:
    alone = msgspec.structs.replace(FACTS, draft=None)
    (sentence,) = differences(FACTS, alone)
    assert "prefill has some, decode has none" in sentence
