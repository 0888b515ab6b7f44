#!/usr/bin/env bash
# pyzmq 27.3.0, with the libzmq 4.3.5 that it bundles
#
# Behaviour: connecting a PUSH socket again to an endpoint that it is already connected to opens
# another connection. Messages then alternate between the connections, so the peer may receive them
# in another order. A DEALER ignores the same call. One disconnect ends all connections.
# Guess: a second connect is refused or has the same effect for both types, and each connect needs
# its own disconnect.
# Seen: PUSH, connected three times: 3 connections, second disconnect refused; DEALER: 1 connection,
# second disconnect refused.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q pyzmq==27.3.0 || exit 77
"$work/venv/bin/python" - <<'END'
import sys

import zmq


def connections(sender, receiver):
    with zmq.Context() as context:
        with context.socket(receiver) as bound, context.socket(sender) as socket:
            endpoint = f"tcp://127.0.0.1:{bound.bind_to_random_port('tcp://127.0.0.1')}"
            events = bound.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            for _ in range(3):
                socket.connect(endpoint)
            count = 0
            while count < 3 and events.poll(2_000 if sender == zmq.DEALER and count else 30_000):
                events.recv_multipart()
                count += 1
            bound.disable_monitor()
            socket.disconnect(endpoint)
            try:
                socket.disconnect(endpoint)
                second = "accepted"
            except zmq.ZMQError:
                second = "refused"
            return count, second


push = connections(zmq.PUSH, zmq.PULL)
dealer = connections(zmq.DEALER, zmq.ROUTER)
print("connected three times: connections, second disconnect")
print("PUSH:", *push)
print("DEALER:", *dealer)
if push != (3, "refused") or dealer != (1, "refused"):
    sys.exit("changed: a second connect to the same endpoint behaves differently")
END
