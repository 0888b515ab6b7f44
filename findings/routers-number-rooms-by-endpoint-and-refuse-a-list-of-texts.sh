#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: with "n": 2, a /generate request gets one bootstrap_room, but a chat request gets a
# list of two, for one prompt. A /generate request with a list of texts, which SGLang serves, is
# rejected with 422; one with a list of lists of token ids is accepted. A room sent by the client is
# replaced.
# Guess: one room per prompt, or per sample, at every endpoint; and both kinds of lists are
# accepted.
# Seen: both routers: /generate n=2 1 room, chat n=2 2 rooms, ids 2 rooms, texts 422, own room
# False.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, Router, Server

GENERATE = {"input_ids": [1], "sampling_params": {"n": 2}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}
IDS = {"input_ids": [[1], [2]], "sampling_params": {}}
TEXTS = {"text": ["x", "y"], "sampling_params": {}}
OWN = {"input_ids": [1], "bootstrap_room": 5, "sampling_params": {}}
seen = {}
for kind in COMMANDS:
    prefill, decode = Server(), Server()
    with Router(kind, prefill.url, decode.url) as router:
        assert router.ask("/generate", GENERATE)[0] == 200
        assert router.ask("/v1/chat/completions", CHAT)[0] == 200
        assert router.ask("/generate", IDS)[0] == 200
        texts = router.ask("/generate", TEXTS)[0]
        assert router.ask("/generate", OWN)[0] == 200
    rooms = [body["bootstrap_room"] for _, body in decode.posts]
    counts = [len(room) if isinstance(room, list) else 1 for room in rooms[:3]]
    seen[kind] = (*counts, texts, rooms[3] == 5)
    print("{}: /generate n=2 {} room, chat n=2 {}, ids {}, texts {}, own room {}".format(kind, *seen[kind]))
if set(seen.values()) != {(1, 2, 2, 422, False)}:
    sys.exit("changed: a router numbers rooms differently")
END
