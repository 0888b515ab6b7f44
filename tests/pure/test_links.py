"""Many peers: whatever comes is read, and those that are idle cost memory and descriptors alone."""

from __future__ import annotations

import gc
import select
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from rig.answers import silent
from rig.peers import DecodeRank, PrefillRank
from rig.resources import resources
from rig.threads import wait_for

from sglang_mixkv.channel.messages import Ack, Fail, Message, encode
from sglang_mixkv.channel.sockets import Poller, new_context
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import links
from sglang_mixkv.decode.links import BATCH, Links

PEER, HOST, SOON_MS, MANY = b"%08d" % 0, "127.0.0.1", 10_000, 100
PATIENT = Times(100)  # nothing here is late


class Ranks:
    """A prefill rank's socket, and a decode rank that is connected to it."""

    def __init__(self) -> None:
        self._context = new_context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.links = Links(None, Times())
        port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        row: Any = SimpleNamespace(instance=PEER, address=f"tcp://{HOST}:{port}")
        self.links.add(self.links.dial(row))
        assert self.links.send(PEER, Ack(((0, 1),)))
        self._name = self._socket.recv_multipart()[0]
        self.look(0)

    def send(self, message: Message) -> None:
        self._socket.send_multipart([self._name, encode(message)])

    def look(self, timeout_ms: int = SOON_MS) -> list[tuple[bytes, Message | ValueError]]:
        return list(self.links.received(self.links.poller.poll(timeout_ms)))

    def close(self) -> None:
        self.links._context.destroy(linger=0)
        self._context.destroy(linger=0)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    one = Ranks()
    yield one
    one.close()


def is_named(ranks: Ranks, timeout_s: float = 0) -> bool:
    """Whether the kernel names the socket."""
    return bool(select.select([ranks.links.poller._epoll], [], [], timeout_s)[0])


def test_a_message_that_came_before_a_send_is_read(ranks: Ranks) -> None:
    """The send makes the socket's FD silent."""
    ranks.send(Fail(1, 2, "lost"))
    assert is_named(ranks, 10)
    time.sleep(0.05)  # a send in the same millisecond may leave the FD alone
    assert ranks.links.send(PEER, Ack(((0, 1),)))
    assert not is_named(ranks)
    assert ranks.look() == [(PEER, Fail(1, 2, "lost"))]


def test_more_messages_than_one_look_takes_need_no_further_signal(ranks: Ranks) -> None:
    sent = [(PEER, Fail(number, 2, "lost")) for number in range(3 * BATCH)]
    for _, message in sent:
        ranks.send(message)
    found = list[tuple[bytes, Message | ValueError]]()
    while len(found) < len(sent):
        some = ranks.look()
        assert 0 < len(some) <= BATCH
        found += some
    assert found == sent


def test_what_came_before_a_socket_was_registered_is_read() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        router = context.socket(zmq.ROUTER)
        dealer.connect(f"tcp://{HOST}:{router.bind_to_random_port(f'tcp://{HOST}')}")
        dealer.send(b"here")
        router.send_multipart([router.recv_multipart()[0], b"there"])
        assert dealer.poll(SOON_MS)  # which makes its FD silent
        poller = Poller()
        poller.register(dealer)
        assert poller.poll(SOON_MS) == [dealer]
        poller.unregister(dealer)
        assert poller.poll(0) == []
        router.close()


@pytest.mark.parametrize(
    "address",
    ["tcp://prefill.example:9100", "ipc:///tmp/a:1", "inproc://a:1", "tcp://127.0.0.1", "", "a:b"],
)
def test_what_no_prefill_rank_binds_is_not_connected_to(ranks: Ranks, address: str) -> None:
    """All sockets wait while libzmq's thread looks up a name."""
    with pytest.raises(ValueError, match="expected tcp://IP:PORT"):
        ranks.links.dial(SimpleNamespace(address=address))  # type: ignore[arg-type]


def test_a_rank_that_does_not_answer_is_given_up(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.1)
    with silent() as address, pytest.raises(TimeoutError):
        ranks.links.dial(SimpleNamespace(address=f"tcp://{address}", instance=PEER))


@pytest.mark.parametrize(("kind", "descriptors"), [(DecodeRank, 2), (PrefillRank, 1)])
def test_a_peer_takes_little_memory_and_few_descriptors(kind: Any, descriptors: int) -> None:
    rank = kind(MANY, MANY, PATIENT)
    try:
        rank.connect(1)
        assert None not in rank.run([0], 1)
        gc.collect()  # what is garbage has descriptors, too
        before = resources()
        rank.connect(MANY - 1)
        assert None not in rank.run(list(range(MANY)), 8)
        now = resources()
        assert now["fds"] - before["fds"] == descriptors * (MANY - 1)
        assert now["rss_mib"] - before["rss_mib"] < (MANY - 1) / 8 - 1  # both are rounded down
    finally:
        rank.close()


def test_idle_peers_are_not_asked_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    getsockopt = zmq.Socket.getsockopt

    def counted(socket: Any, option: int) -> Any:
        if option == zmq.EVENTS:
            asked.append(socket)
        return getsockopt(socket, option)

    monkeypatch.setattr(zmq.Socket, "getsockopt", counted)
    rank, rooms = DecodeRank(MANY, MANY, PATIENT), 20
    try:
        rank.connect(MANY)
        assert wait_for(lambda: len(set(asked)) == MANY)  # each once, when it is new
        asked.clear()
        assert None not in rank.run([7] * rooms, 1)
        assert 2 * rooms <= len(asked) <= 8 * rooms
        assert len(set(asked)) == 1
    finally:
        rank.close()
