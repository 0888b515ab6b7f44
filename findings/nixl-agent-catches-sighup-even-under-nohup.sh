#!/usr/bin/env bash
# nixl-cu13 1.5.1, with the UCX that it bundles
#
# Behaviour: creating an agent installs a C handler for SIGHUP, even if nohup has set the signal to
# be ignored. After a SIGHUP, UCX logs at its highest level to standard output, so closing the
# terminal does not end the server, but fills its log. UCX_DEBUG_SIGNO=0 prevents this.
# Guess: a transfer library does not change its process's signal handlers, least of all for an
# ignored signal.
# Seen: by default: default -> caught; under nohup: ignored -> caught; with UCX_DEBUG_SIGNO=0:
# ignored -> ignored.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-deps nixl-cu13==1.5.1 numpy==2.3.5 || exit 77
"$work/venv/bin/python" -c 'import nixl_cu13' || exit 77 # names the missing library
cat >"$work/program.py" <<'END'
import signal
import sys

from nixl_cu13._api import nixl_agent, nixl_agent_config


def action():
    """What the kernel does with SIGHUP; no signal is sent."""
    lines = dict(line.split(":\t") for line in open("/proc/self/status"))
    sets = {"ignored": lines["SigIgn"], "caught": lines["SigCgt"]}
    return next((n for n, mask in sets.items() if int(mask, 16) & 1), "default")


signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
before = action()
agent = nixl_agent("one", nixl_agent_config(backends=["UCX"]))
print("SIGHUP:", before, "->", action())
END
run() { env "${@:2}" "$work/venv/bin/python" "$work/program.py" "$1" | grep '^SIGHUP:'; }
seen="by default: $(run no)
under nohup: $(run nohup)
under nohup, UCX_DEBUG_SIGNO=0: $(run nohup UCX_DEBUG_SIGNO=0)"
echo "$seen"
[ "$seen" = "by default: SIGHUP: default -> caught
under nohup: SIGHUP: ignored -> caught
under nohup, UCX_DEBUG_SIGNO=0: SIGHUP: ignored -> ignored" ] || {
    echo "changed: an agent handles SIGHUP differently" >&2
    exit 1
}
