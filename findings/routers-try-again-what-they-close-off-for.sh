#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: a decode server's 400 or 404 is returned to the client unchanged, opens no breaker and
# is not retried. Each other error tried here, 4xx or 5xx, is retried elsewhere and counts against
# both servers, even 422 or 503: after two such errors, a pair gets no more requests.
# Guess: there is a status code with which a decode server can refuse one prefill server, so that
# the router tries another one and does not count the error against healthy servers.
# Seen: both routers. With one pair: 400 and 404 for each of three requests; for 409, 422, 424, 429,
# 500, 503 and 504, 500 (for 503: 503) with the reason twice, then 503 "No available"; with
# --disable-circuit-breaker, the reason each time. With a second, fitting prefill server: five or
# six of ten requests get the 400, none of them the 500 or 503.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import sys

from standins import COMMANDS, REQUEST, Router, Server, error, ok

FIRST, SECOND = 8998, 8999  # bootstrap ports


def three(kind, status, *flags):
    """Three requests to a pair that decode refuses: the codes, if the last one has the reason, and
    decode's number of tries for all."""
    prefill, decode = Server(), Server(error(status))
    with Router(kind, prefill.url, decode.url, *flags) as router:
        answers = [router.ask("/generate", REQUEST) for _ in range(3)]
    return *(code for code, _ in answers), b"the reason" in answers[-1][1], len(decode.posts)


def failed(kind, status):
    """How many of ten requests fail where decode refuses one of two prefill servers."""
    refuse = error(status)

    def some(path, body):
        return (refuse if body["bootstrap_port"] == FIRST else ok)(path, body)

    first, second, decode = Server(), Server(), Server(some)
    with Router(kind, first.url, decode.url, "--prefill", second.url, str(SECOND)) as router:
        return sum(router.ask("/generate", REQUEST)[0] != 200 for _ in range(10))


changed = []
for kind in COMMANDS:
    seen = {status: three(kind, status) for status in (400, 404)}
    seen |= {status: three(kind, status) for status in (409, 422, 424, 429, 500, 503, 504)}
    for status, got in seen.items():
        told = 503 if status == 503 else 500
        open_at_third = (told, told, 503, False, 10)
        expected = (status,) * 3 + (True, 3) if status in (400, 404) else open_at_third
        changed += [(kind, status, got)] * (got != expected)
    opened = three(kind, 500, "--disable-circuit-breaker")
    shares = {status: failed(kind, status) for status in (400, 500, 503)}
    print(f"{kind}: {seen}, without breaker {opened}, of ten with a second server {shares}")
    changed += [(kind, opened)] * (opened != (500, 500, 500, True, 15))
    is_same = 0 < shares.pop(400) < 10 and not any(shares.values())
    changed += [(kind, shares)] * (not is_same)
if changed:
    sys.exit(f"changed: statuses are tried again or counted in another way: {changed}")
END
