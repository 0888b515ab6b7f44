#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1
#
# Behaviour: on a host without an RDMA device, `initialize` succeeds for "rdma", for a NIC that does
# not exist and for an unknown protocol, and the bytes go over TCP.
# Guess: an error, or at least a return code other than 0, since a caller that names a protocol
# needs it.
# Seen: 0 from each initialize and each read, with correct bytes.
set -euo pipefail
if compgen -G '/sys/class/infiniband/*' >/dev/null; then
    echo "this host has an RDMA device, which Mooncake would use"
    exit 77
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.3.5 || exit 77
"$work/venv/bin/python" -c 'import mooncake.engine' || exit 77 # names the missing library
"$work/venv/bin/python" - <<'END'
import sys

import numpy as np
from mooncake.engine import TransferEngine

CASES = (("rdma", ""), ("rdma", "mlx5_77"), ("carrier-pigeon", ""))
rows, here = np.arange(251, dtype=np.uint8), np.zeros(251, dtype=np.uint8)
changed = False
for protocol, device in CASES:
    owner, reader = TransferEngine(), TransferEngine()
    started = [e.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, device) for e in (owner, reader)]
    got = None
    if started == [0, 0]:
        here[:] = 0
        owner.register_memory(rows.ctypes.data, rows.nbytes)
        reader.register_memory(here.ctypes.data, here.nbytes)
        session = f"127.0.0.1:{owner.get_rpc_port()}"
        got = reader.transfer_sync_read(session, here.ctypes.data, rows.ctypes.data, rows.nbytes)
    right = bool((here == rows).all())
    print(f"protocol {protocol!r}, device {device!r}: initialize {started}, read {got}, right {right}")
    changed |= (started, got, right) != ([0, 0], 0, True)
if changed:
    sys.exit("changed: Mooncake no longer accepts a transport that does not exist")
END
