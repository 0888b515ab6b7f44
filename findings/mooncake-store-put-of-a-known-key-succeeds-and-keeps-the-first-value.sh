#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1, its store with one master
#
# Behaviour: put of an existing key returns 0 and changes nothing, even if the new value has another
# length, and also in a batch. Only upsert replaces the value.
# Guess: the last put wins, or the second one returns an error.
# Seen: put 0, again 0, value first; put_batch 0, values first and new; upsert 0, value second.
set -euo pipefail
master=""
work="$(mktemp -d)"
trap '[ -z "$master" ] || kill "$master"; rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q mooncake-transfer-engine-non-cuda==0.3.13.post1 || exit 77
"$work/venv/bin/python" -c 'import mooncake.store' || exit 77 # names the missing library
read -r rpc metrics < <("$work/venv/bin/python" -c 'import socket
free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(s.getsockname()[1] for s in free))')
"$work/venv/bin/mooncake_master" --rpc_port="$rpc" --metrics_port="$metrics" >"$work/log" 2>&1 &
master=$!
"$work/venv/bin/python" - "$rpc" <<'END'
import sys
import time

from mooncake.store import MooncakeDistributedStore


def client():
    """With a segment of 16 MiB for the store; waits for the master."""
    for _ in range(300):
        made = MooncakeDistributedStore()
        master = f"127.0.0.1:{sys.argv[1]}"
        if made.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", master) == 0:
            return made
        time.sleep(0.1)
    raise SystemExit("the master does not answer")


store = client()
seen = [store.put("a", b"first"), store.put("a", b"second, and longer"), store.get("a")]
seen += [store.put_batch(["a", "b"], [b"second", b"new"]), store.get("a"), store.get("b")]
seen += [store.upsert("a", b"second"), store.get("a")]
print("put {}, again {}, value {}; put_batch {}, values {} and {}; upsert {}, value {}".format(*seen))
store.close()
if seen != [0, 0, b"first", 0, b"first", b"new", 0, b"second"]:
    sys.exit("changed: put of an existing key behaves differently")
END
