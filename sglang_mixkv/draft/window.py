"""The rows at a prompt's end that a drafter reads. Decode requests only these.

A query after the prompt attends to `window` earlier tokens in SGLang 0.5.21 to 0.5.23: with DFLASH
(dflash_worker_v2.py, _compute_compact_draft_seq_lens), Llama's EAGLE3 (models/llama_eagle3.py) and
layers of `sliding_attention` (models/dflash.py). A row spans all layers, so each needs a window.

With decode's radix cache, which its host cache needs, all rows are transferred: a shorter prompt
with the same prefix may need any of them.
"""

from __future__ import annotations

from typing import Any

LLAMA_EAGLE3 = "LlamaForCausalLMEagle3"
BLOCKS = {
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "DSparkDraftModel",
    "Qwen3DSparkModel",
    "LingDSparkModel",
}
WINDOWED = frozenset({"fa3", "fa4", "trtllm_mha", "intel_amx"})
"""Attention backends that apply a layer's window in draft steps, draft extends and blocks.
FlashInfer's draft steps read the whole prompt (flashinfer_backend.py, call_begin_forward), and
Triton's have no window before 0.5.23 (triton_backend.py, TritonMultiStepDraftBackend)."""


def window_of(flags: Any, config: Any) -> int | None:
    """Return the window in tokens, None if the drafter may read the whole prompt. `flags`: SGLang's
    resolved arguments. `config`: the drafter's config in transformers."""
    asked, own = flags.speculative_draft_window_size, flags.speculative_draft_attention_backend
    if flags.disaggregation_decode_enable_radix_cache or flags.speculative_draft_sink_size:
        return None
    if asked and flags.speculative_algorithm == "DFLASH":
        return int(asked)
    both = flags.prefill_attention_backend, flags.decode_attention_backend
    backends = {own or backend or flags.attention_backend for backend in both}
    # With top-k above 1, the queries of a step share one position, and attend to more.
    if flags.speculative_eagle_topk != 1 or not backends <= WINDOWED:
        return None
    architecture, text = config.architectures[0], config.get_text_config()
    if architecture == LLAMA_EAGLE3:
        return asked
    layers = set(getattr(text, "layer_types", None) or ())
    size = getattr(text, "sliding_window", None) or 0
    if architecture not in BLOCKS or layers != {"sliding_attention"} or size < 2:
        return None
    return int(size) - 1  # transformers counts the query's own token


def pages_left_out(pages: int, page_size: int, window: int | None) -> int:
    """Return how many pages to leave out at a prompt's start. The last page may hold only one
    token, and DFLASH reads from a page boundary on."""
    return 0 if window is None else max(0, pages - 1 - -(-window // page_size))
