#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0, in front of stand-ins for SGLang's servers
#
# Behaviour: a request whose prefill server is stopped, while its host still accepts connections,
# waits for --request-timeout-secs and is then tried on another server. Removing the server from the
# router frees no request that waits for it; killing its process does, and it is tried at once.
# Meanwhile the router's metrics page counts it in smg_worker_requests_active.
# Guess: a server that is removed, or fails its health checks, gives back what waits for it.
# Seen: both routers: 200 after the timeout of 6 s; after DELETE still waiting; after the kill 200; one
# active request.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # standins.py
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q sglang-router==0.3.2 smg==1.13.0 || exit 77
PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" - <<'END'
import json
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from standins import COMMANDS, REQUEST, Router, Server

SERVE = "from standins import Server; import signal; print(Server().url, flush=True); signal.pause()"


@contextmanager
def process():
    """A stand-in in a process of its own: the process and its URL."""
    one = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    try:
        yield one, one.stdout.readline().strip()
    finally:
        one.kill()
        one.wait()


def waiting(router, pool):
    """Ask until a request is still without an answer after 2 s, which the stopped server has."""
    while True:
        asked = pool.submit(router.ask, "/generate", REQUEST)
        if wait([asked], timeout=2).not_done:
            return asked


def counted(router, url):
    """How many requests the router counts at this server, on its metrics page."""
    with urllib.request.urlopen(router.metrics, timeout=10) as page:
        lines = page.read().decode().splitlines()
    (one,) = (x for x in lines if x.startswith("smg_worker_requests_active{") and url in x)
    return float(one.split()[-1])


def remove(router, url):
    workers = json.loads(router.ask("/workers")[1])["workers"]
    (number,) = (one["id"] for one in workers if one["url"] == url)
    request = urllib.request.Request(f"{router.url}/workers/{number}", method="DELETE")
    with urllib.request.urlopen(request, timeout=10):
        pass


seen = {}
for kind in COMMANDS:
    for limit in ("6", "600"):
        with process() as (stopped, url), ThreadPoolExecutor(1) as pool:
            second, decode = Server(), Server()
            flags = "--prefill", second.url, "8999", "--request-timeout-secs", limit
            with Router(kind, url, decode.url, *flags) as router:
                stopped.send_signal(signal.SIGSTOP)
                asked = waiting(router, pool)
                if limit == "600":
                    active = counted(router, url)
                    remove(router, url)
                    kept = bool(wait([asked], timeout=8).not_done)
                    stopped.kill()
                    freed = asked.result(20)[0]
                else:
                    begin = time.monotonic()
                    code = asked.result(30)[0]
                    late = time.monotonic() - begin > 2
    seen[kind] = code, late, kept, freed, active
    print(f"{kind}: after the timeout {code}; waits after DELETE {kept}; after the kill {freed}; active {active}")
if set(seen.values()) != {(200, True, True, 200, 1.0)}:
    sys.exit(f"changed: a stopped server holds requests in another way: {seen}")
END
