#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: for POST /workers with the URL of a known worker and another bootstrap port,
# sglang-router answers 202 and keeps the old port; smg rejects it with 409 and names the call that
# changes the port. A prefill server that returns with another port can therefore not be reached
# through sglang-router.
# Guess: the port is updated, or the call fails.
# Seen: sglang-router 202, smg 409; with both, requests contain the old port.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, REQUEST, Router, Server

seen = {}
for kind in COMMANDS:
    prefill, decode = Server(), Server()
    with Router(kind, prefill.url, decode.url) as router:
        new = {"url": prefill.url, "worker_type": "prefill", "bootstrap_port": 8999}
        code, _ = router.ask("/workers", new)
        other = Server()  # added after it, so both are dealt with once this one is there
        router.ask("/workers", {"url": other.url, "worker_type": "decode"})
        for _ in range(600):
            router.ask("/generate", REQUEST)
            if other.posts:
                break
    ports = {body["bootstrap_port"] for _, body in prefill.posts + other.posts}
    seen[kind] = code, sorted(ports)
    print(f"{kind}: {code}, bootstrap ports of requests {sorted(ports)}")
if seen != {"sglang-router": (202, [8998]), "smg": (409, [8998])}:
    sys.exit("changed: a known worker is handled differently")
END
