#!/usr/bin/env bash
# nixl-cu13 1.5.1 (UCX)
#
# Behaviour: add_remote_agent merges newer metadata of a known agent: a region that the agent has
# deregistered meanwhile stays known until remove_remote_agent is called. Until then, an agent that
# has restarted under the same name is refused.
# Guess: newer metadata replaces the known metadata, and a restart counts as newer metadata.
# Seen: new region known False, then True; dropped region known True, after removing and adding
# False; restarted agent nixlNotAllowedError.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-deps nixl-cu13==1.5.1 numpy==2.3.5 || exit 77
"$work/venv/bin/python" -c 'import nixl_cu13' || exit 77 # names the missing library
"$work/venv/bin/python" - <<'END'
import sys

import numpy as np
from nixl_cu13._api import nixl_agent, nixl_agent_config

SIZE = 4096


def agent(name):
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


owner, peer = agent("owner"), agent("peer")
old, new = np.zeros(SIZE, dtype=np.uint8), np.zeros(SIZE, dtype=np.uint8)


def known(array):
    """Whether the peer knows the region, by NIXL's own answer."""
    return peer.check_remote_metadata("owner", peer.get_xfer_descs([(array.ctypes.data, SIZE, 0)], "DRAM"))


dropped = owner.register_memory([(old.ctypes.data, SIZE, 0, "")], "DRAM")
peer.add_remote_agent(owner.get_agent_metadata())
owner.register_memory([(new.ctypes.data, SIZE, 0, "")], "DRAM")
seen = [known(new)]
owner.deregister_memory(dropped)
peer.add_remote_agent(owner.get_agent_metadata())
seen += [known(new), known(old)]
peer.remove_remote_agent("owner")
peer.add_remote_agent(owner.get_agent_metadata())
seen += [known(old)]
try:
    peer.add_remote_agent(agent("owner").get_agent_metadata())
    seen.append("added")
except Exception as error:
    seen.append(type(error).__name__)
print("new region known: before {}, after newer metadata {}".format(*seen))
print("dropped region known: after newer metadata {}, after removing and adding {}".format(*seen[2:]))
print("another agent of that name:", seen[4])
if seen != [False, True, True, False, "nixlNotAllowedError"]:
    sys.exit("changed: NIXL handles newer metadata of a known agent differently")
END
