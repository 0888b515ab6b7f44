#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1, its store with one master
#
# Behaviour: put with replica_num 2 returns 0 if only one segment exists, and makes one replica. The
# second replica is made neither when another segment joins nor when the key is put again.
# Guess: the put fails, or the missing replica is made as soon as possible.
# Seen: put 0, replicas 1; second segment, put again 0, replicas 1; new key 0, replicas 2.
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

from mooncake.store import MooncakeDistributedStore, ReplicateConfig


def client():
    """With a segment of 16 MiB for the store; waits for the master."""
    for _ in range(300):
        made = MooncakeDistributedStore()
        master = f"127.0.0.1:{sys.argv[1]}"
        if made.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", master) == 0:
            return made
        time.sleep(0.1)
    raise SystemExit("the master does not answer")


twice = ReplicateConfig()
twice.replica_num = 2
first = client()
seen = [first.put("a", b"value", twice), len(first.get_replica_desc("a"))]
second = client()
for number in range(100):  # until the master gives the second segment to somebody
    new = f"b{number}", first.put(f"b{number}", b"value", twice)
    if len(first.get_replica_desc(new[0])) == 2:
        break
    time.sleep(0.1)
seen += [first.put("a", b"value", twice), len(first.get_replica_desc("a"))]
seen += [new[1], len(first.get_replica_desc(new[0]))]
print("put {}, replicas {}; second segment, put again {}, replicas {}; new key {}, replicas {}".format(*seen))
second.close()
first.close()
if seen != [0, 1, 0, 1, 0, 2]:
    sys.exit("changed: the store makes another number of replicas")
END
