#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: smg returns the first error from either side to the client, and drops the other side's
# request. sglang-router waits until both sides have answered, however long the healthy side takes.
# Guess: two related routers behave alike: the client gets the error, whichever side it is from.
# Seen: smg: prefill's 400 before decode's answer True, decode's 500 before prefill's answer True;
# sglang-router: the same codes, False and False.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError

from standins import COMMANDS, REQUEST, Router, Server, error, ok


def asked(kind, failing, code):
    """The client's code, and whether it came before the other half had answered."""
    go_on = threading.Event()

    def late(path, body):
        go_on.wait(60)
        return ok(path, body)

    answers = {"prefill": late, "decode": late, failing: error(code)}
    urls = [Server(answers[role]).url for role in ("prefill", "decode")]
    with Router(kind, *urls, "--disable-retries") as router, ThreadPoolExecutor(1) as pool:
        request = pool.submit(router.ask, "/generate", REQUEST)
        try:
            request.result(20 if kind == "smg" else 3)
            early = True
        except TimeoutError:
            early = False
        go_on.set()
        return request.result()[0], early


seen = {}
for kind in COMMANDS:
    of_prefill, of_decode = asked(kind, "prefill", 400), asked(kind, "decode", 500)
    seen[kind] = of_prefill, of_decode
    print(f"{kind}: prefill's {of_prefill[0]} before decode's answer {of_prefill[1]},", end=" ")
    print(f"decode's {of_decode[0]} before prefill's answer {of_decode[1]}")
if seen != {"sglang-router": ((400, False), (500, False)), "smg": ((400, True), (500, True))}:
    sys.exit("changed: a router waits for other answers than before")
END
