"""The number of descriptors for the drafter's KV, in SGLang and in the channel."""

from __future__ import annotations

import pytest

from sglang_mixkv.channel.slots import slots_of
from sglang_mixkv.draft.layout import DraftFacts
from sglang_mixkv.tools.plan import descriptors

EAGLE3 = DraftFacts("LlamaForCausalLMEagle3", "EAGLE3", 64, (256, 256), "bfloat16")
DSPARK = DraftFacts("Qwen3DSparkModel", "DSPARK", 16, (128,) * 10, "bfloat16")


@pytest.mark.parametrize(
    ("facts", "tokens", "page", "heads", "sources", "stock", "channel"),
    [
        (EAGLE3, 32_768, 1, 8, 1, 65_536, 32),  # 1,024 tokens a slot
        (EAGLE3, 1_024, 64, 8, 1, 32, 1),
        (EAGLE3, 1_025, 64, 8, 1, 34, 2),  # one more token takes one more page and slot
        (EAGLE3, 8_192, 16, 4, 2, 1_024, 8),  # half the heads from each of two ranks
        (DSPARK, 8_192, 1, 2, 1, 81_920, 5),  # 1,638 tokens a slot
        (DSPARK, 1, 16, 2, 1, 10, 1),
        (EAGLE3, 64, 16, 64 * 300, 1, 8, 0),  # no token fits a slot
    ],
)
def test_a_chunk_takes(
    facts: DraftFacts, tokens: int, page: int, heads: int, sources: int, stock: int, channel: int
) -> None:
    slot = slots_of(256)[1]
    assert descriptors(facts, tokens, page, slot, heads, sources) == (stock, channel)
