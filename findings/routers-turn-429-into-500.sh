#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: a server's 429 (its queue is full) is returned to the client as 500, whether it is from
# prefill or from decode. 400 and 503 are returned unchanged.
# Guess: the code is forwarded, so that clients back off instead of reporting a fault.
# Seen: both routers, both sides: 429 -> 500, 400 -> 400, 503 -> 503.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, REQUEST, Router, Server, error

changed = False
for kind in COMMANDS:
    for failing in ("prefill", "decode"):
        seen = {}
        for code in (429, 400, 503):
            servers = [Server(error(code)) if r == failing else Server() for r in ("prefill", "decode")]
            urls = [server.url for server in servers]
            with Router(kind, *urls, "--disable-retries") as router:
                seen[code] = router.ask("/generate", REQUEST)[0]
        print(f"{kind}, {failing}:", *(f"{code} -> {got}" for code, got in seen.items()))
        changed |= seen != {429: 500, 400: 400, 503: 503}
if changed:
    sys.exit("changed: a router forwards other codes")
END
