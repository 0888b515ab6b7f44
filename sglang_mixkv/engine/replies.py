"""Answers to peers that are not known (yet): one message, and nothing is kept of it.

SGLang keeps a socket for every address it has sent to, and waits up to 30 s where a queue is
full. That is for peers; who only claims to be one is answered from a socket of its own, with
no wait, and from a context that can hold few of them, so that no stranger uses up what the
peers need.
"""

from __future__ import annotations

import logging

import zmq
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

MAX_SOCKETS = 64
LINGER_MS = 2000


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
            logger.warning("sglang-mixkv could not answer %s: %s", address.to_tcp(), error)
