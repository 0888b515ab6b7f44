#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1, over TCP with P2PHANDSHAKE
#
# Behaviour: the port in initialize("127.0.0.1:PORT", ...) is ignored. The engine chooses a port
# between MC_MIN_RPC_PORT and MC_MAX_RPC_PORT, 15000 to 17000 by default, and listens on all
# interfaces, despite the loopback address.
# Guess: the engine listens on the given address and port, or fails.
# Seen: initialize 0, on the asked port False, between 15000 and 17000 True, listens on 0.0.0.0.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.3.5 || exit 77
"$work/venv/bin/python" -c 'import mooncake.engine' || exit 77 # names the missing library
"$work/venv/bin/python" - <<'END'
import socket
import sys

from mooncake.engine import TransferEngine


def listeners():
    """Addresses, in hexadecimal, and ports of IPv4's listening sockets."""
    rows = [line.split() for line in open("/proc/net/tcp")][1:]
    return {int(at.split(":")[1], 16): at.split(":")[0] for _, at, _, state, *_ in rows if state == "0A"}


with socket.create_server(("127.0.0.1", 0)) as probe:
    asked = probe.getsockname()[1]
engine = TransferEngine()
code = engine.initialize(f"127.0.0.1:{asked}", "P2PHANDSHAKE", "tcp", "")
port = engine.get_rpc_port()
address = listeners().get(port)
everywhere = address == "00000000"
print(f"initialize {code}, on the asked port {port == asked}, between 15000 and 17000", end=" ")
print(f"{15000 <= port <= 17000}, listens on {'0.0.0.0' if everywhere else address}")
if (code, port == asked, 15000 <= port <= 17000, everywhere) != (0, False, True, True):
    sys.exit("changed: Mooncake uses another port or address than before")
END
