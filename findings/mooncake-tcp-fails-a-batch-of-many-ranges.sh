#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1, over TCP
#
# Behaviour: a batch of many small ranges to one healthy peer fails immediately. A peer's queue
# accepts about 2,000 ranges. All further ranges are rejected, even if they are small. The log has
# "TCP lane queue-full rejection".
# Guess: the engine queues all ranges, and only memory or a time limit bounds a batch.
# Seen: 1024 ranges of 64 bytes: 0, 16384 ranges of 64 bytes: -1, one range of 1 MiB: 0.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.3.5 || exit 77
"$work/venv/bin/python" -c 'import mooncake.engine' || exit 77 # names the missing library
"$work/venv/bin/python" - <<'END'
import sys

import numpy as np
from mooncake.engine import TransferEngine

APART = 256
rows = np.arange(16384 * APART, dtype=np.uint8)
here = np.zeros_like(rows)


def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


owner = engine()
assert owner.register_memory(rows.ctypes.data, rows.nbytes) == 0
session = f"127.0.0.1:{owner.get_rpc_port()}"


def read(count, size):
    offsets = range(0, count * APART, APART)
    into, of = ([array.ctypes.data + o for o in offsets] for array in (here, rows))
    return engine().batch_transfer_sync_read(session, into, of, [size] * count)


seen = {
    "1024 ranges of 64 bytes": read(1024, 64),
    "16384 ranges of 64 bytes": read(16384, 64),
    "one range of 1 MiB": read(1, 1 << 20),
}
print(", ".join(f"{what}: {code}" for what, code in seen.items()))
if list(seen.values()) != [0, -1, 0]:
    sys.exit("changed: Mooncake's TCP accepts another number of ranges at once")
END
