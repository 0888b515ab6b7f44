#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: sglang-router forwards only the /generate fields that it knows, and answers 200 without
# a warning. It drops constraints, stop expressions and the DP rank. smg drops fewer fields. From a
# chat request, sglang-router also drops return_meta_info, with which SGLang returns the accept
# length; smg drops none. Neither drops a field of /v1/completions.
# Guess: a router forwards unknown fields, and the server decides whether a field is valid.
# Seen: sglang-router drops custom_params, logit_bias, routed_dp_rank, stop_regex,
# stream_interval, structural_tag; smg logit_bias, stop_regex, stream_interval, structural_tag. Of
# chat: custom_params, return_meta_info, stop_regex; smg none.
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
GENERATE = {"input_ids": [1], "sampling_params": SAMPLING, "routed_dp_rank": 0}
COMPLETION = {"model": "m", "prompt": "x", "max_tokens": 4, "stop_regex": "x+", "custom_params": {"a": 1},
              "logit_bias": {"1": 1.0}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "return_meta_info": True,
        "stop_regex": "x+", "custom_params": {"a": 1}, "min_p": 0.1}
ASKED = {"/generate": GENERATE, "/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
seen = {}
for kind in COMMANDS:
    prefill, decode = Server(), Server()
    with Router(kind, prefill.url, decode.url) as router:
        codes = {router.ask(path, body)[0] for path, body in ASKED.items()}
    generate, completion, chat = (body for _, body in decode.posts)
    dropped = {*SAMPLING} - {*generate["sampling_params"]} | {*GENERATE} - {*generate}
    of_completion, of_chat = {*COMPLETION} - {*completion}, {*CHAT} - {*chat}
    seen[kind] = codes, sorted(dropped), sorted(of_completion), sorted(of_chat)
    print(f"{kind}: {codes}, dropped of /generate, completions, chat: {seen[kind][1:]}")
both = ["logit_bias", "stop_regex", "stream_interval", "structural_tag"]
of_chat = ["custom_params", "return_meta_info", "stop_regex"]
more = ["custom_params", "routed_dp_rank"]
if seen != {
    "sglang-router": ({200}, sorted([*both, *more]), [], of_chat),
    "smg": ({200}, both, [], []),
}:
    sys.exit("changed: a router drops other fields")
END
