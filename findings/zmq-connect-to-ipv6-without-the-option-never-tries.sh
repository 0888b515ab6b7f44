#!/usr/bin/env bash
# pyzmq 27.3.0, with the libzmq that it brings
#
# Behaviour: without the option IPV6, `bind` to an IPv6 address raises, but `connect` to one
# succeeds, and so does `send`. The socket never tries to connect and keeps the messages. Only its
# monitor shows that: it announces another try again and again, without a first one.
# Guess: `connect` raises as `bind` does.
# Seen: bind: No such device; connect and send: no error; first events without the option:
# CONNECT_RETRIED, CONNECT_RETRIED; with it: CONNECT_DELAYED, CONNECTED.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q pyzmq==27.3.0 || exit 77
"$work/venv/bin/python" - <<'END'
import sys

import zmq
from zmq.utils.monitor import recv_monitor_message

LOOPBACK = "[::1]"
context = zmq.Context()
server = context.socket(zmq.PULL)
server.setsockopt(zmq.IPV6, 1)
try:
    port = server.bind_to_random_port(f"tcp://{LOOPBACK}")
except zmq.ZMQError:
    print("no IPv6")
    sys.exit(77)
try:
    context.socket(zmq.PULL).bind_to_random_port(f"tcp://{LOOPBACK}")
    bound = "no error"
except zmq.ZMQError as error:
    bound = error.strerror.partition(" (")[0]
print("bind without the option:", bound)
events = {}
for option in (0, 1):
    client = context.socket(zmq.PUSH)
    client.setsockopt(zmq.IPV6, option)
    client.setsockopt(zmq.LINGER, 0)
    monitor = client.get_monitor_socket()
    client.connect(f"tcp://{LOOPBACK}:{port}")
    client.send(b"metadata", zmq.NOBLOCK)
    found = (zmq.Event(recv_monitor_message(monitor)["event"]).name for _ in range(2))
    events[option] = ", ".join(found)
    print(f"connect and send with the option {option}: no error; {events[option]}")
    client.disable_monitor()
    client.close()
expected = {0: "CONNECT_RETRIED, CONNECT_RETRIED", 1: "CONNECT_DELAYED, CONNECTED"}
if (bound, events) != ("No such device", expected):
    sys.exit("changed: connect to an IPv6 address without the option IPV6 behaves otherwise")
END
