#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: a decode server that answers 500 also opens the circuit breaker of the prefill server,
# although the prefill server answers every request. The router tries each request five times, so
# after two requests it answers 503 with the message that the prefill servers are unhealthy, and
# contacts no server for a minute.
# Guess: a breaker counts its own server's errors, and the message names the server that fails.
# Seen: both routers: 500, 500, 503 "No available prefill workers"; for the last request, no server
# is contacted.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, REQUEST, Router, Server, error

seen = {}
for kind in COMMANDS:
    prefill, decode = Server(), Server(error(500))
    with Router(kind, prefill.url, decode.url) as router:
        codes = [router.ask("/generate", REQUEST)[0] for _ in range(2)]
        before = len(prefill.posts) + len(decode.posts)
        code, body = router.ask("/generate", REQUEST)
    asked = len(prefill.posts) + len(decode.posts) > before
    named = b"No available prefill workers" in body
    seen[kind] = (*codes, code, named, asked)
    print(f"{kind}: {codes}, then {code}, names prefill {named}, asks a server {asked}")
if set(seen.values()) != {(500, 500, 503, True, False)}:
    sys.exit("changed: decode's errors open other servers' breakers than before")
END
