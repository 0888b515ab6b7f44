#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1, over TCP
#
# Behaviour: an engine reads into, and writes from, memory of its own process that was never
# registered. The peer's memory must be registered, otherwise the peer refuses the transfer.
# Guess: both ends of a transfer must be registered, as over RDMA.
# Seen: read into unregistered memory 0, write from it 0, all bytes right True; read of the peer's
# unregistered memory -1.
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

SIZE = 4096


def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


owner, other = engine(), engine()
registered, unregistered = np.arange(2 * SIZE, dtype=np.uint32).view(np.uint8).reshape(2, -1)
assert owner.register_memory(registered.ctypes.data, registered.nbytes) == 0
session, here = f"127.0.0.1:{owner.get_rpc_port()}", np.zeros(SIZE, np.uint8)
arguments = session, here.ctypes.data, registered.ctypes.data, SIZE
seen = {"read into unregistered memory": other.transfer_sync_read(*arguments)}
right = (here == registered[:SIZE]).all()
here[:] = 7
seen["write from it"] = other.transfer_sync_write(*arguments)
right &= (registered[:SIZE] == 7).all() and (registered[SIZE:] != 7).any()
seen["all bytes right"] = bool(right)
arguments = session, here.ctypes.data, unregistered.ctypes.data, SIZE
seen["read of the peer's unregistered memory"] = other.transfer_sync_read(*arguments)
print(", ".join(f"{what} {code}" for what, code in seen.items()))
if list(seen.values()) != [0, 0, True, -1]:
    sys.exit("changed: a transfer over TCP depends otherwise on the registration of memory")
END
