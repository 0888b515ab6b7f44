#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1, over TCP
#
# Behaviour: two adjacent registered ranges are not one readable range. The peer refuses a read that
# crosses from the first into the second, even by a few bytes, although every byte of it is
# registered.
# Guess: registered memory can be read, however it was registered.
# Seen: first range 0, second range 0, across the border -1, after registering both as one 0.
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

HALF = 4096


def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


owner, reader = engine(), engine()
rows = np.arange(2 * HALF, dtype=np.uint8)
start, here = rows.ctypes.data, np.zeros_like(rows)
session = f"127.0.0.1:{owner.get_rpc_port()}"


def read(offset, length):
    return reader.transfer_sync_read(session, here.ctypes.data, start + offset, length)


assert [owner.register_memory(start + at, HALF) for at in (0, HALF)] == [0, 0]
seen = {"first range": read(0, HALF), "second range": read(HALF, HALF)}
seen["across the border"] = read(HALF - 8, 16)
assert [owner.unregister_memory(start + at) for at in (0, HALF)] == [0, 0]
assert owner.register_memory(start, 2 * HALF) == 0
again = engine()  # a refused read may cost the next one of the same engine its connection
seen["after registering both as one"] = again.transfer_sync_read(
    session, here.ctypes.data, start + HALF - 8, 16
)
print(", ".join(f"{what} {code}" for what, code in seen.items()))
if list(seen.values()) != [0, 0, -1, 0]:
    sys.exit("changed: a read across two adjacent registrations no longer fails, or others do")
END
