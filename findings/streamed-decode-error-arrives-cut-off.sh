#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: for a streamed request, the routers wrap decode's error in a "data:" line, which
# lengthens the answer, but keep the Content-Length of decode's answer. The client gets only the
# beginning of the reason, as invalid JSON.
# Guess: the client gets the status and the whole reason, as without a stream.
# Seen: both routers: 500, end of the reason included False; without a stream True.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, REQUEST, Router, Server, error

END_OF_REASON = b"the remedy is here"
REASON = "expected a page size of 64, got 16; " + END_OF_REASON.decode()
seen = {}
for kind in COMMANDS:
    with Router(kind, Server().url, Server(error(500, REASON)).url, "--disable-retries") as router:
        answers = [router.ask("/generate", REQUEST | {"stream": s}) for s in (True, False)]
    seen[kind] = tuple((code, END_OF_REASON in body) for code, body in answers)
    print(f"{kind}: streamed {seen[kind][0]}, not streamed {seen[kind][1]}")
    print("   ", answers[0][1])
if set(seen.values()) != {((500, False), (500, True))}:
    sys.exit("changed: another part of a streamed request's error arrives")
END
