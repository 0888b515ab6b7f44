#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: sglang-router's /engine_metrics joins its servers' pages, renames `sglang:x` to
# `sglang_x` and adds the label worker_addr. If one server's series have the label dp_rank and
# another's do not, as with DP attention on decode alone, the router answers 500 and returns no
# series. smg keeps the names, and adds the missing label.
# Guess: Prometheus can scrape the router instead of each server, and finds the same names.
# Seen: sglang-router: with the same labels 200, sglang_x; with others 500. smg: 200, sglang:x,
# twice.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, Router, Server, ok


def page(labels):
    name = "sglang:num_running_reqs"
    return f"# HELP {name} requests\n# TYPE {name} gauge\n{name}{{{labels}}} 1.0\n"


seen = {}
for kind in COMMANDS:
    for name, labels in (("same", 'tp_rank="0"'), ("other", 'dp_rank="0",tp_rank="0"')):
        prefill, decode = Server(ok, page('tp_rank="0"')), Server(ok, page(labels))
        with Router(kind, prefill.url, decode.url) as router:
            code, body = router.ask("/engine_metrics")
        seen[kind, name] = code, b"\nsglang_num_" in body, b"\nsglang:num_" in body
        print(f"{kind}, {name} labels: {code} {body[:200].decode()!r}")
if list(seen.values()) != [(200, True, False), (500, False, False), *[(200, False, True)] * 2]:
    sys.exit(f"changed: /engine_metrics shows other pages or names: {seen}")
END
