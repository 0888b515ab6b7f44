#!/usr/bin/env bash
# Start SGLang's router in front of prefill and decode servers. Variables: common.sh.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read -r -a COMMAND <<<"${ROUTER:-python -m sglang_router.launch_router}"
COMMAND+=(--pd-disaggregation --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}")
for server in ${PREFILL:-http://127.0.0.1:30000,8998}; do
    url="${server%,*}" bootstrap=8998
    [ "$url" = "$server" ] || bootstrap="${server##*,}"
    COMMAND+=(--prefill "$url" "$bootstrap")
done
for server in ${DECODE:-http://127.0.0.1:30001}; do
    COMMAND+=(--decode "$server")
done
run "$@"
