#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: of a /generate request with fields that SGLang has, sglang-router forwards only those
# that it knows itself, and answers 200 without a word: constraints, stop expressions and the DP
# rank are gone. smg drops fewer. Of /v1/completions neither drops any.
# Guess: a router passes on what it does not know; the server says whether a field is valid.
# Seen: sglang-router drops cache_salt, custom_params, logit_bias, routed_dp_rank, stop_regex,
# stream_interval, structural_tag; smg logit_bias, stop_regex, stream_interval, structural_tag.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, Router, Server

SAMPLING = {
    "max_new_tokens": 4, "logit_bias": {"1": 1.0}, "structural_tag": "{}", "stop_regex": "x+",
    "custom_params": {"a": 1}, "stream_interval": 3, "min_p": 0.1,
}
GENERATE = {"input_ids": [1], "sampling_params": SAMPLING, "routed_dp_rank": 0, "cache_salt": "s"}
COMPLETION = {"model": "m", "prompt": "x", "max_tokens": 4, "stop_regex": "x+", "custom_params": {"a": 1},
              "logit_bias": {"1": 1.0}, "cache_salt": "s"}
seen = {}
for kind in COMMANDS:
    prefill, decode = Server(), Server()
    with Router(kind, prefill.url, decode.url) as router:
        codes = router.ask("/generate", GENERATE)[0], router.ask("/v1/completions", COMPLETION)[0]
    generate, completion = (body for _, body in decode.posts)
    dropped = {*SAMPLING} - {*generate["sampling_params"]} | {*GENERATE} - {*generate}
    of_completion = {*COMPLETION} - {*completion}
    seen[kind] = (*codes, sorted(dropped), sorted(of_completion))
    print(f"{kind}: {codes[0]}, dropped {', '.join(seen[kind][2])}; {codes[1]}, dropped {seen[kind][3]}")
both = ["logit_bias", "stop_regex", "stream_interval", "structural_tag"]
if seen != {
    "sglang-router": (200, 200, sorted([*both, "cache_salt", "custom_params", "routed_dp_rank"]), []),
    "smg": (200, 200, both, []),
}:
    sys.exit("changed: a router drops other fields")
END
