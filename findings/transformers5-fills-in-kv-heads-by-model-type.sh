#!/usr/bin/env bash
# transformers 5.19.0, without torch
#
# Behaviour: if a drafter's config.json has no num_key_value_heads, the number depends on its
# model_type: the number of attention heads for llama, but a constant for mistral (8), gemma (16)
# and qwen3 (32), even if there are fewer attention heads. There is no warning.
# Guess: without a number, every family has the same number of KV heads as attention heads.
# Seen: with 32 attention heads llama 32, mistral 8, gemma 16, qwen3 32; with 4 llama 4, mistral 8,
# gemma 16, qwen3 32.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.19.0 || exit 77
"$work/venv/bin/python" - "$work" 2>"$work/log" <<'END' || { cat "$work/log" >&2 && exit 1; }
import json
import sys
from pathlib import Path

from transformers import AutoConfig

FOLDER = Path(sys.argv[1]) / "drafter"
FOLDER.mkdir()
SHAPE = {"hidden_size": 512, "num_attention_heads": 32, "num_hidden_layers": 1,
         "intermediate_size": 64, "vocab_size": 100}


def load(**given):
    """What transformers makes of a drafter's config.json."""
    (FOLDER / "config.json").write_text(json.dumps(SHAPE | given))
    return AutoConfig.from_pretrained(FOLDER)


seen = {
    heads: {m: load(model_type=m, num_attention_heads=heads).num_key_value_heads
            for m in ("llama", "mistral", "gemma", "qwen3")}
    for heads in (32, 4)
}  # fmt: skip
for heads, found in seen.items():
    print(f"{heads} attention heads:", ", ".join(f"{m} {number}" for m, number in found.items()))
constant = {"mistral": 8, "gemma": 16, "qwen3": 32}
if seen != {heads: {"llama": heads} | constant for heads in (32, 4)}:
    sys.exit("changed: transformers sets other numbers of KV heads")
END
