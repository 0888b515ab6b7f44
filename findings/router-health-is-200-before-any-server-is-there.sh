#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, without any server behind them
#
# Behaviour: a router whose servers have not started yet answers /health with 200, while each
# request gets 503. Only /readiness returns 503.
# Guess: /health is meant for probes, and returns 503 until a request can be served.
# Seen: both routers: /health 200, /readiness 503, /generate 503.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, REQUEST, Router, address

seen = {}
for kind in COMMANDS:
    urls = [f"http://{address()}" for _ in range(2)]
    with Router(kind, *urls, ready="/health") as router:
        seen[kind] = 200, router.ask("/readiness")[0], router.ask("/generate", REQUEST)[0]
    print("{}: /health {}, /readiness {}, /generate {}".format(kind, *seen[kind]))
if set(seen.values()) != {(200, 503, 503)}:
    sys.exit("changed: a router without servers answers differently")
END
