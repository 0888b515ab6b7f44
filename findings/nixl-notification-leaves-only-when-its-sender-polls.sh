#!/usr/bin/env bash
# nixl-cu13 1.5.1 (UCX)
#
# Behaviour: the notification of a WRITE is not sent until its sender queries the state of the
# transfer, although the bytes have long arrived and the progress thread is enabled.
# Guess: the progress thread sends the notification as soon as the bytes have arrived.
# Seen: bytes landed True, notifications in 3 s none; after one more poll by the sender: done.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-deps nixl-cu13==1.5.1 numpy==2.3.5 || exit 77
"$work/venv/bin/python" -c 'import nixl_cu13' || exit 77 # names the missing library
"$work/venv/bin/python" - <<'END'
import sys
import time

import numpy as np
from nixl_cu13._api import nixl_agent, nixl_agent_config

SIZE = 64
config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
writer, reader = nixl_agent("writer", config), nixl_agent("reader", config)
rows, there = np.ones(SIZE, dtype=np.uint8), np.zeros(SIZE, dtype=np.uint8)
writer.register_memory([(rows.ctypes.data, SIZE, 0, "")], "DRAM")
reader.register_memory([(there.ctypes.data, SIZE, 0, "")], "DRAM")
name = writer.add_remote_agent(reader.get_agent_metadata())
ends = [writer.get_xfer_descs([(a.ctypes.data, SIZE, 0)], "DRAM") for a in (rows, there)]
handle = writer.initialize_xfer("WRITE", *ends, name, b"done")


def notified(seconds):
    """What has arrived by then, from any agent."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := reader.get_new_notifs():
            return found
        time.sleep(0.01)
    return {}


at_once = writer.transfer(handle) == "DONE"  # then it was sent with the post: not this case
until = time.monotonic() + 20
while not there.all() and time.monotonic() < until:
    time.sleep(0.01)
unasked = notified(3)
while writer.check_xfer_state(handle) == "PROC":
    time.sleep(0.01)
asked = notified(20)
print(f"bytes landed {bool(there.all())}, done at the post {at_once}, in 3 s {unasked}, after a poll {asked}")
if not there.all() or at_once or unasked or asked != {"writer": [b"done"]}:
    sys.exit("changed: a notification is sent at another time")
END
