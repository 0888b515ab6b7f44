#!/usr/bin/env bash
# nixl-cu13 1.5.1, with the UCX that it bundles
#
# Behaviour: UCX_TLS=sm (shared memory), which is meant for processes on one host, yields no UCX
# backend. In NIXL's default error mode ("peer"), UCX needs a transport that reports a lost peer,
# and TCP is the only transport on every host that does so. With error mode "none", sm works.
# Guess: shared memory alone is enough between processes on one host.
# Seen: sm, peer: nixlBackendError; sm, none: ok; tcp, peer: ok; sm,tcp, peer: ok.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-deps nixl-cu13==1.5.1 numpy==2.3.5 || exit 77
"$work/venv/bin/python" -c 'import nixl_cu13' || exit 77 # names the missing library
cat >"$work/program.py" <<'END'
import sys

from nixl_cu13._api import nixl_agent, nixl_agent_config

agent = nixl_agent("one", nixl_agent_config(backends=[]))
try:
    agent.create_backend("UCX", {"ucx_error_handling_mode": sys.argv[1]})
    print("STATE ok")
except Exception as error:
    print("STATE", type(error).__name__)
END
seen=""
for case in "sm peer" "sm none" "tcp peer" "sm,tcp peer"; do
    read -r transports mode <<<"$case"
    state="$(UCX_TLS="$transports" "$work/venv/bin/python" "$work/program.py" "$mode" | sed -n 's/^STATE //p')"
    echo "UCX_TLS=$transports, error mode $mode: $state"
    seen+="$state "
done
[ "$seen" = "nixlBackendError ok ok ok " ] || {
    echo "changed: other transports are enough for NIXL" >&2
    exit 1
}
