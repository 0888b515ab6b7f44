"""Messages to decode ranks that must not wait. SGLang keeps a socket for every address it has sent
to, and waits up to 30 s where a peer does not read.

`Replies`: to peers that are not known (yet). Each message has a socket of its own, from a
context that can hold few of them, so that no stranger uses up what the peers need.

`Notices`: to peers, from SGLang's scheduler and the thread that all registrations go through.
"""

from __future__ import annotations

import logging
import threading

import zmq
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

MAX_SOCKETS = 64
MAX_PEERS = 512
LINGER_MS = 2000
RECONNECT_MS = 10_000


class Replies:
    """One-shot messages to addresses that a message named."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)

    def send(self, endpoint: str, port: int, parts: list[bytes]) -> None:
        """Best effort; raises nothing."""
        address = NetworkAddress(endpoint, port)
        try:
            with self._context.socket(zmq.PUSH) as socket:
                socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
                socket.setsockopt(zmq.LINGER, LINGER_MS)
                socket.connect(address.to_tcp())
                socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning(
                "[MIXKV-MSG-02] sglang-mixkv could not answer %s: %s", address.to_tcp(), error
            )


class Notices:
    """Messages over sockets that are kept. What a peer does not take is dropped with a warning:
    it has left a thousand messages unread, or is gone."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # used last: last

    def send(self, endpoint: str, port: int, parts: list[bytes]) -> None:
        """Best effort; neither raises nor waits."""
        address = NetworkAddress(endpoint, port)
        try:
            with self._lock:
                self._socket(address).send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning(
                "[MIXKV-MSG-02] sglang-mixkv could not tell %s: %s", address.to_tcp(), error
            )

    def _socket(self, address: NetworkAddress) -> zmq.Socket[bytes]:
        name = address.to_tcp()
        socket = self._sockets.pop(name, None)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
            socket.connect(name)
        self._sockets[name] = socket
        if len(self._sockets) > MAX_PEERS:
            self._sockets.pop(next(iter(self._sockets))).close()
        return socket
