"""What both sides must agree on: one sentence for each difference."""

from __future__ import annotations

import msgspec
import pytest

from sglang_mixkv.protocol.facts import DraftFacts, Facts, differences, draft_differences

FACTS = Facts(
    plugin="0.1.0", engine="0.5.23", page_size=64, kv_cache_dtype="bf16", aux_item_lens=(64, 8),
    speculative_algorithm="EAGLE3", topk=1, steps=3,
    draft=DraftFacts("mha", "LlamaForCausalLMEagle3", 8, (256, 256)),
)  # fmt: skip

CHANGES = {
    "backend": "nixl",
    "memory": "NVLINK",
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
    excused = {"plugin", "steps", "draft", "draft_aux", "extents", "dcp"}
    assert set(CHANGES) | excused == set(msgspec.structs.asdict(FACTS))
    assert set(DRAFT_CHANGES) == set(msgspec.structs.asdict(FACTS.draft))


def test_what_cannot_hurt_is_not_refused() -> None:
    assert differences(FACTS, msgspec.structs.replace(FACTS, plugin="0.2.0", steps=5)) == []


def test_drafter_on_one_side() -> None:
    alone = msgspec.structs.replace(FACTS, draft=None)
    (sentence,) = differences(FACTS, alone)
    assert "prefill has some, decode has none" in sentence
