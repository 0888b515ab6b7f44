#!/usr/bin/env bash
# transformers 5.19.0, without torch
#
# Behaviour: a config.json with "rope_theta" loads, but the config has no attribute of that name:
# the value is in rope_parameters (and its alias rope_scaling, which is never None). If the config
# is saved again, the file has no "rope_theta" either.
# Guess: config.rope_theta has the file's value, and saving writes the field that was read.
# Seen: attribute False, rope_scaling {'rope_theta': 1000000.0, 'rope_type': 'default'}, saved
# rope_theta None, saved rope_parameters the same.
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


config = load(model_type="llama", architectures=["LlamaForCausalLMEagle3"], rope_theta=1e6)
config.save_pretrained(FOLDER / "again")
saved = json.loads((FOLDER / "again" / "config.json").read_text())
rope = {"rope_theta": 1e6, "rope_type": "default"}
seen = hasattr(config, "rope_theta"), config.rope_scaling, saved.get("rope_theta"), saved.get("rope_parameters")
print("attribute {}, rope_scaling {}, saved rope_theta {}, saved rope_parameters {}".format(*seen))
if seen != (False, rope, None, rope):
    sys.exit("changed: transformers stores rope_theta elsewhere")
END
