#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1, over TCP
#
# Behaviour: a batch of two reads, of which the peer refuses the second, returns -1, but the bytes
# of the first read have arrived. (If the refused read is the first one, the bytes of the other read
# may or may not arrive.)
# Guess: a batch that failed as a whole has not changed its targets.
# Seen: -1, first landed True, refused landed False.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.3.5 || exit 77
"$work/venv/bin/python" -c 'import mooncake.engine' || exit 77 # names the missing library
"$work/venv/bin/python" - <<'END'
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine

SIZE = 1024
rows = np.full(4 * SIZE, 7, dtype=np.uint8)
start = rows.ctypes.data
good, refused = start, start + rows.nbytes - 8  # the second one ends outside what is registered


def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


owner = engine()
assert owner.register_memory(start, rows.nbytes) == 0
session = f"127.0.0.1:{owner.get_rpc_port()}"


here = np.zeros((2, SIZE), dtype=np.uint8)
into = [row.ctypes.data for row in here]
code = engine().batch_transfer_sync_read(session, into, [good, refused], [SIZE] * 2)
until = time.monotonic() + 20  # what a failed batch has still in flight may land after it
while time.monotonic() < until and not here[0].all():
    time.sleep(0.01)
first, second = (bool(row.any()) for row in here)
print(f"{code}, first landed {first}, refused landed {second}")
if (code, first, second) != (-1, True, False):
    sys.exit("changed: a failed batch moves other bytes than before")
END
