#!/usr/bin/env bash
# ai-dynamo-runtime 1.6.1
#
# Behaviour: DYN_SYSTEM_PORT, the port of a worker's metrics and health pages, is parsed as a signed
# 16-bit number. With 40000, the runtime does not start.
# Guess: any port is valid.
# Seen: 30000 up; 40000 "invalid value unsigned int `40000`, expected i16".
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-deps ai-dynamo-runtime==1.6.1 uvloop==0.22.1 || exit 77
"$work/venv/bin/pip" install -q pydantic==2.12.5 || exit 77
cat >"$work/worker.py" <<'END'
import asyncio

from dynamo.runtime import DistributedRuntime


async def main():
    DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    print("up")


asyncio.run(main())
END
export DYN_FILE_KV="$work/store" DYN_EVENT_PLANE=zmq
seen=""
for port in 30000 40000; do
    said="$(DYN_SYSTEM_PORT="$port" timeout 60 "$work/venv/bin/python" "$work/worker.py" 2>&1 || true)"
    case "$said" in
        *"expected i16"*) what=refused ;;
        *up*) what=up ;;
        *) echo "$said" && what=other ;;
    esac
    echo "$port $what"
    seen="$seen $what"
done
[ "$seen" = " up refused" ] || { echo "changed: DYN_SYSTEM_PORT:$seen" && exit 1; }
