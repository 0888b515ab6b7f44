#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1, its store with one master
#
# Behaviour: is_exist gives a key the same lease as a get. A full store evicts keys to make room,
# but not keys with a lease. If all keys have only been queried, each put fails with -200 until the
# leases end (after 5 or 10 s by default, ten minutes here).
# Guess: asking whether a key exists changes nothing, and does not prevent others from writing.
# Seen: full store: room again; full store of keys that were asked for: -200.
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
"$work/venv/bin/mooncake_master" --rpc_port="$rpc" --metrics_port="$metrics" --default_kv_lease_ttl=600000 >"$work/log" 2>&1 &
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


VALUE = b"v" * (1 << 20)


def put_within(store, key, seconds):
    until = time.monotonic() + seconds
    while (code := store.put(key, VALUE)) != 0 and time.monotonic() < until:
        time.sleep(0.05)
    return code


def fill(store, ask):
    """Until a put fails."""
    count = 0
    while store.put(f"{ask}-{count}", VALUE) == 0:
        assert not ask or store.is_exist(f"{ask}-{count}") == 1
        count += 1


store = client()
fill(store, ask=False)
plain = put_within(store, "after", 30)
store.remove_all(True)
fill(store, ask=True)
asked = put_within(store, "after", 5)
print(f"put into a full store {plain}, into one of keys that were asked for {asked}")
store.close()
if (plain, asked) != (0, -200):
    sys.exit("changed: is_exist no longer prevents the eviction of keys")
END
