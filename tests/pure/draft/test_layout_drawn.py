"""The arithmetic of slots, pages and windows, compared with plain counting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_mixkv.draft import layout, slot_format
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout, Pages
from sglang_mixkv.draft.slot_format import weights
from sglang_mixkv.draft.window import BLOCKS, LLAMA_EAGLE3, WINDOWED, pages_left_out, window_of

# ---------------------------------------------------------------- slots


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 8), st.integers(0, 3000)
)
def test_the_number_of_tokens_in_a_slot(widths: list[int], heads: int, slot_bytes: int) -> None:
    """A slot holds as many tokens as fit after its header of 64 bytes, with 8 bytes for padding."""
    facts = DraftFacts("a", "b", 8, tuple(widths), "uint8")
    one = sum(heads * width for width in widths)
    tokens = 0
    while 64 + (tokens + 1) * one + 8 <= slot_bytes:
        tokens += 1
    assert facts.bytes_per_token(heads) == one
    assert facts.tokens_in(slot_bytes, heads) == tokens


def test_checksum_weights_equal_the_documented_formula() -> None:
    """The weights of the checksum equal the formula of docs/protocol.md.

    Both sides of a pair need the same weights.
    """
    mask = (1 << 64) - 1

    def weight(place: int) -> int:
        found = place * 0x9E3779B97F4A7C15 & mask
        found = (found ^ found >> 32) * 0xD6E8FEB86659FD93 & mask
        return (found ^ found >> 32) | 1

    assert weights(1000).tolist() == [weight(place) for place in range(1, 1001)]
    assert weights(0).tolist() == []


def test_the_format_of_slots_is_unchanged() -> None:
    """The format of a slot and its checksum do not change, since other releases use them too."""
    assert (slot_format.HEADER, slot_format.PROBE_OFFSET, slot_format.SLOT_OVERHEAD) == (64, 16, 72)
    assert (slot_format.SEED, slot_format.MASK) == (0x2545F4914F6CDD1D, 2**64 - 1)
    assert list(slot_format.SlotCheck) == [0, 1, 2, 3]  # the values that the kernels return
    assert (layout.MAX_ENTRIES, list(layout.NO_HEADS), layout.NO_HEADS.stop) == (1024, [], 0)


@given(
    st.integers(1, 7),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9, unique=True),
    st.data(),
)
def test_rows_are_listed_in_the_order_of_pages(size: int, pages: list[int], data: Any) -> None:
    """Rows are listed in the order of their pages, as 64-bit numbers.

    SGLang's page numbers have 32 bits, and row numbers may need more.
    """
    rows = [page * size + token for page in pages for token in range(size)]
    offset = data.draw(st.integers(0, len(rows)))
    count = data.draw(st.integers(0, len(rows) - offset))
    found = Pages(np.array(pages, np.int32), size).rows(offset, count)
    assert found.tolist() == rows[offset : offset + count]
    assert found.dtype == np.int64


def test_pages_are_uploaded_once() -> None:
    taken = list[object]()

    def put(numbers: object) -> object:
        taken.append(numbers)
        return f"on the device: {numbers}"

    device, done = SimpleNamespace(pages=put), object()
    pages = Pages([3, 4], 16, [done])
    assert [pages.on(device) for _ in range(3)] == ["on the device: [3, 4]"] * 3
    assert (taken, pages.events) == ([[3, 4]], [done])
    assert Pages([], 1).events == ()


def test_a_layout_has_the_heads_of_its_rank() -> None:
    facts = DraftFacts("a", "b", 8, (2,), "uint8")
    assert [list(DraftLayout(facts, 4, rank).heads) for rank in range(4)] == [
        [0, 1], [2, 3], [4, 5], [6, 7],
    ]  # fmt: skip


# ---------------------------------------------------------------- windows


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 200))
@example(2, 4, 4)
@example(2, 4, 5)
def test_pages_before_the_window_are_left_out(pages: int, size: int, window: int) -> None:
    """Pages before the window are left out.

    The last page may hold a single token, so the pages before it must hold the whole window.
    """
    kept = 0
    while kept * size < window:
        kept += 1
    assert pages_left_out(pages, size, window) == len(range(pages)[: -kept - 1])
    assert pages_left_out(pages, size, None) == 0


FLAGS = {
    "speculative_algorithm": "EAGLE3", "speculative_draft_window_size": 512,
    "speculative_draft_attention_backend": None, "speculative_draft_sink_size": 0,
    "disaggregation_decode_enable_radix_cache": False, "prefill_attention_backend": None,
    "decode_attention_backend": None, "attention_backend": "fa3", "speculative_eagle_topk": 1,
}  # fmt: skip
BY_ITSELF = {"architecture": LLAMA_EAGLE3, "layer_types": None, "sliding_window": None}
BLOCK = {"architecture": "DSparkDraftModel", "layer_types": ["sliding_attention"] * 3,
         "sliding_window": 2048}  # fmt: skip
DFLASH = {"speculative_algorithm": "DFLASH"}
DSPARK = {"speculative_algorithm": "DSPARK"}
PER_LAYER = [(512, {}, BY_ITSELF), (2047, DSPARK, BLOCK)]  # windows that the backend implements


def reach(flags: dict[str, Any], config: dict[str, Any]) -> int | None:
    text = SimpleNamespace(**{k: v for k, v in config.items() if k != "architecture"})
    names = [config["architecture"], "SecondOfTwo"]
    drafter = SimpleNamespace(architectures=names, get_text_config=lambda: text)
    return window_of(SimpleNamespace(**FLAGS | flags), drafter)


# flags for the backend of prefill, decode, both and the drafter, and whether they allow a window
BACKENDS = [
    (None, None, "fa3", None, True), (None, None, "flashinfer", None, False),
    ("fa4", "trtllm_mha", "flashinfer", None, True), ("fa3", None, "flashinfer", None, False),
    (None, "fa3", "flashinfer", None, False), ("flashinfer", "fa3", "fa3", None, False),
    ("fa3", "flashinfer", "fa3", None, False), ("fa3", "fa3", "triton", None, True),
    ("flashinfer", "triton", "triton", "intel_amx", True), ("fa3", "fa3", "fa3", "triton", False),
]  # fmt: skip


@pytest.mark.parametrize(("prefill", "decode", "both", "own", "windowed"), BACKENDS)
def test_a_window_needs_all_backends_to_implement_it(
    prefill: str | None, decode: str | None, both: str, own: str | None, windowed: bool
) -> None:
    named = {
        "prefill_attention_backend": prefill, "decode_attention_backend": decode,
        "attention_backend": both, "speculative_draft_attention_backend": own,
    }  # fmt: skip
    for window, flags, config in PER_LAYER:
        assert reach(flags | named, config) == (window if windowed else None)
    assert reach(DFLASH | named, BLOCK) == 512  # DFLASH limits its page table


@pytest.mark.parametrize("window", sorted(WINDOWED))
def test_each_windowed_backend_gives_a_window(window: str) -> None:
    assert reach({"attention_backend": window}, BY_ITSELF) == 512


ALL = [*PER_LAYER, (512, DFLASH, BLOCK), (512, DFLASH, BY_ITSELF)]


def test_there_is_no_window_with_a_radix_cache_or_sinks() -> None:
    for window, flags, config in ALL:
        assert reach(flags, config) == window
        for change in (
            {"disaggregation_decode_enable_radix_cache": True}, {"speculative_draft_sink_size": 1},
        ):  # fmt: skip
            assert reach(flags | change, config) is None


def test_layers_have_no_window_with_a_top_k_above_1() -> None:
    for window, flags, config in PER_LAYER:
        for topk in (0, 2, 8):
            assert reach(flags | {"speculative_eagle_topk": topk}, config) is None
        assert reach(flags | DFLASH | {"speculative_eagle_topk": 2}, config) == 512
        assert reach(flags, config) == window


def test_without_the_flag_only_a_block_drafters_config_counts() -> None:
    none = {"speculative_draft_window_size": None}
    assert reach(none, BY_ITSELF) is None
    for flags in (DFLASH, DSPARK):
        assert reach(flags | none, BLOCK) == 2047
    assert reach({}, BY_ITSELF | {"architecture": "DeepseekV3ForCausalLMNextN"}) is None


@pytest.mark.parametrize("architecture", sorted(BLOCKS))
@pytest.mark.parametrize(
    ("changed", "window"),
    [
        ({}, 2047), ({"sliding_window": 2}, 1), ({"sliding_window": 1}, None),
        ({"sliding_window": None}, None), ({"layer_types": []}, None),
        ({"layer_types": None}, None), ({"layer_types": ["full_attention"]}, None),
        ({"layer_types": ["sliding_attention", "full_attention"]}, None),
    ],
)  # fmt: skip
def test_all_layers_of_a_block_drafter_need_a_window(
    architecture: str, changed: dict[str, Any], window: int | None
) -> None:
    assert reach(DSPARK, BLOCK | {"architecture": architecture} | changed) == window
    assert reach(DSPARK, BLOCK | {"architecture": "Qwen3ForCausalLM"} | changed) is None


def test_a_config_without_the_fields_has_no_window() -> None:
    assert reach(DSPARK, {"architecture": "DSparkDraftModel"}) is None
    assert reach(DSPARK, {"architecture": "DSparkDraftModel", "sliding_window": 9}) is None
