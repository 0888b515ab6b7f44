#!/usr/bin/env bash
# nixl-cu13 1.5.1 (UCX) and mooncake-transfer-engine-non-cuda 0.3.13.post1 (TCP)
#
# Behaviour: if a range was registered twice, NIXL needs two deregistrations before peers can no
# longer read it. Mooncake refuses the second registration with -7, and one unregistration removes
# the range for all users. Mooncake's batch_register_memory registers no range of a batch if one of
# the ranges is already registered.
# Guess: both engines handle a second owner of a pool in the same way, and a batch registers all
# ranges that it can.
# Seen: NIXL DONE, DONE, nixlNotFoundError; Mooncake 0, -7, unregister 0, read -1; batch -7, and a
# read of its new range -1.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.3.5 || exit 77
"$work/venv/bin/pip" install -q --no-deps nixl-cu13==1.5.1 || exit 77
"$work/venv/bin/python" -c 'import mooncake.engine, nixl_cu13' || exit 77 # names the missing library
"$work/venv/bin/python" - <<'END'
import sys

import numpy as np
from mooncake.engine import TransferEngine
from nixl_cu13._api import nixl_agent, nixl_agent_config

SIZE = 4096
rows, new, here = (np.zeros(SIZE, dtype=np.uint8) for _ in range(3))
at, into = rows.ctypes.data, here.ctypes.data

agents = [nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("owner", "reader")]
owner, reader = agents
owned = [owner.register_memory([(at, SIZE, 0, "")], "DRAM") for _ in range(2)]
reader.register_memory([(into, SIZE, 0, "")], "DRAM")


def over_nixl():
    name = reader.add_remote_agent(owner.get_agent_metadata())
    try:
        ends = [reader.get_xfer_descs([(a, SIZE, 0)], "DRAM") for a in (into, at)]
        handle = reader.initialize_xfer("READ", *ends, name)
        state = reader.transfer(handle)
        while state == "PROC":
            state = reader.check_xfer_state(handle)
        reader.release_xfer_handle(handle)
    except Exception as error:
        state = type(error).__name__
    reader.remove_remote_agent(name)
    return state


states = [over_nixl()]
for one in owned:
    owner.deregister_memory(one)
    states.append(over_nixl())
print("NIXL, registered twice, read after 0, 1 and 2 deregistrations:", *states)


def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


first, batch = engine(), engine()
codes = [first.register_memory(at, SIZE), first.register_memory(at, SIZE)]
codes.append(first.unregister_memory(at))
session = f"127.0.0.1:{first.get_rpc_port()}"
codes.append(engine().transfer_sync_read(session, into, at, SIZE))
print("Mooncake, register twice, unregister once, read:", *codes)

batch.register_memory(at, SIZE)
codes.append(batch.batch_register_memory([new.ctypes.data, at], [SIZE, SIZE]))
session = f"127.0.0.1:{batch.get_rpc_port()}"
codes.append(engine().transfer_sync_read(session, into, new.ctypes.data, SIZE))
print("Mooncake, batch of a new and a known range, read of the new one:", *codes[4:])
if states != ["DONE", "DONE", "nixlNotFoundError"] or codes != [0, -7, 0, -1, -7, -1]:
    sys.exit("changed: NIXL or Mooncake handles a range that is registered twice differently")
END
