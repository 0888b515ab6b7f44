"""How many tokens before the prompt's end the decode side's drafter reads.

A query at the first position after the prompt sees `window` tokens before itself (kv/pages.py).
SGLang 0.5.23 has these windows:

* Llama EAGLE3: every attention layer, by --speculative-draft-window-size
  (models/llama_eagle3.py), where the drafter's attention backend keeps to it (`keeps_to_it`).
  Other EAGLE drafters window their draft steps only.
* DFLASH, by that flag: a table of the last tokens' slots, whatever the layers are
  (dflash_worker_v2.py, _compute_compact_draft_seq_lens). DSPARK ignores the flag.
* DFLASH and DSPARK, by config.json: layers of type sliding_attention (models/dflash.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.speculative.dflash_utils import (
    get_dflash_attention_sliding_window_size,
    get_dflash_layer_types,
)

from sglang_mixkv.protocol.facts import BLOCK_ALGORITHMS

LLAMA_EAGLE3 = "LlamaForCausalLMEagle3"

# Those that window each layer in draft steps and draft extends. FlashInfer's draft steps read the
# whole prompt (spec_utils.py, resolve_draft_decode_window; flashinfer_backend.py, forward_decode).
WINDOWED = frozenset({"fa3", "fa4", "trtllm_mha", "intel_amx"})


def keeps_to_it(algorithm: str, backends: Iterable[str | None], topk: int | None) -> bool:
    """Whether a server with these attention backends for its drafter reads no further than its
    windows. Where that is not known, all of the draft KV is sent."""
    if algorithm in BLOCK_ALGORITHMS:
        return True
    return topk == 1 and WINDOWED.issuperset(backends)


def draft_windows(
    algorithm: str, architecture: str, config: Any, asked: int | None, layers: int
) -> tuple[int, ...]:
    """Tokens, for each layer; 0: all. `asked`: --speculative-draft-window-size."""
    if algorithm not in BLOCK_ALGORITHMS:
        return ((asked or 0) if architecture.startswith(LLAMA_EAGLE3) else 0,) * layers
    bound = (asked or 0) if algorithm == "DFLASH" else 0
    both = [(own, bound) for own in _of_layers(config, layers)]
    return tuple(min((window for window in windows if window), default=0) for windows in both)


def _of_layers(config: Any, layers: int) -> list[int]:
    """0 for a layer that does not slide, and for all where config.json does not name each."""
    types = get_dflash_layer_types(config) or ()
    if len(types) < layers:
        return [0] * layers
    window = get_dflash_attention_sliding_window_size(config) or 0
    return [window if kind == "sliding_attention" else 0 for kind in types[:layers]]
