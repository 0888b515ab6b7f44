"""A decode rank's sockets to its prefill ranks: whatever came is read."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from sglang_mixkv.channel.messages import Ack, Fail, Message, encode
from sglang_mixkv.channel.sockets import Poller, new_context
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.peers import BATCH, Peers

HOST, SOON_MS = "127.0.0.1", 10_000


class Ranks:
    """`count` prefill ranks in one socket, and a decode rank that is connected to them."""

    def __init__(self, count: int = 1) -> None:
        self._context = new_context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.peers = Peers(Times())
        self._names: dict[bytes, bytes] = {}
        for number in range(count):
            port = self._socket.bind_to_random_port(f"tcp://{HOST}")
            row: Any = SimpleNamespace(instance=b"%d" % number, address=f"tcp://{HOST}:{port}")
            self.peers.add(row, self.peers.dial(row))
            assert self.peers.send(row.instance, Ack(0, 1))
            self._names[row.instance] = self._socket.recv_multipart()[0]
        self.look(0)

    def send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([self._names[peer], encode(message)])

    def look(self, timeout_ms: int = SOON_MS) -> list[tuple[bytes, Message | ValueError]]:
        ready: list[Any] = [at for at, _ in self.peers.poller.poll(timeout_ms)]
        return list(self.peers.received(ready))

    def close(self) -> None:
        self.peers.close()
        self._context.destroy(linger=0)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    one = Ranks()
    yield one
    one.close()


def is_named(ranks: Ranks, timeout_s: float = 0) -> bool:
    """Whether the kernel names the socket."""
    return bool(select.select([ranks.peers.poller._epoll], [], [], timeout_s)[0])


def test_a_message_that_came_before_a_send_is_read(ranks: Ranks) -> None:
    """The send makes the socket's FD silent."""
    ranks.send(b"0", Fail(1, 2, "lost"))
    assert is_named(ranks, 10)
    time.sleep(0.05)  # a send in the same millisecond may leave the FD alone
    assert ranks.peers.send(b"0", Ack(0, 1))
    assert not is_named(ranks)
    assert ranks.look() == [(b"0", Fail(1, 2, "lost"))]


def test_more_messages_than_one_look_takes_need_no_further_signal(ranks: Ranks) -> None:
    sent = [(b"0", Fail(number, 2, "lost")) for number in range(3 * BATCH)]
    for peer, message in sent:
        ranks.send(peer, message)
    assert is_named(ranks, 10)
    time.sleep(0.5)  # until all have come
    assert [ranks.look(0) for _ in range(4)] == [*(sent[n * BATCH :][:BATCH] for n in range(3)), []]


def test_what_came_before_a_socket_was_registered_is_read() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        router = context.socket(zmq.ROUTER)
        dealer.connect(f"tcp://{HOST}:{router.bind_to_random_port(f'tcp://{HOST}')}")
        dealer.send(b"here")
        router.send_multipart([router.recv_multipart()[0], b"there"])
        assert dealer.poll(SOON_MS)  # which makes its FD silent
        poller = Poller()
        poller.register(dealer)
        assert poller.poll(SOON_MS) == [(dealer, zmq.POLLIN)]
        poller.unregister(dealer)
        assert poller.poll(0) == []
        poller.close()
        router.close()
