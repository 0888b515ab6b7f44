"""A decode rank's sockets: one DEALER for each prefill rank that it reads from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import Message
from sglang_mixkv.channel.sockets import Poller, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.draft.facts import Row

BATCH = 64  # messages of one peer between two looks at everything else
CONNECT_S = 5.0

Dealer = zmq.Socket[bytes]


class Peers:
    """`dial` may run in any thread; everything else is the channel thread's."""

    def __init__(self, times: Times) -> None:
        self._times, self._context = times, new_context()
        self.poller = Poller()
        self._dealers: dict[ev.Peer, Dealer] = {}
        self._rows: dict[ev.Peer, Row] = {}
        self._names: dict[Dealer, ev.Peer] = {}

    def dial(self, row: Row) -> Dealer:
        """A socket that is connected. Raises TimeoutError where nothing answers."""
        dealer = new_socket(self._context, zmq.DEALER, row.address, self._times)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # what cannot leave now is an error, not a queue
        dealer.connect(row.address)
        if not dealer.poll(int(CONNECT_S * 1000), zmq.POLLOUT):
            dealer.close()
            raise TimeoutError(f"no connection within {CONNECT_S:.0f} s")
        return dealer

    def add(self, row: Row, dealer: Dealer) -> list[ev.Peer]:
        """Former instances at the same address, which are dropped."""
        if row.instance in self._dealers:
            dealer.close()
            return []
        former = [peer for peer, known in self._rows.items() if known.address == row.address]
        for peer in former:
            self.drop(peer)
        self._dealers[row.instance], self._rows[row.instance] = dealer, row
        self._names[dealer] = row.instance
        self.poller.register(dealer)
        return former

    def drop(self, peer: ev.Peer) -> Row | None:
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            self.poller.unregister(dealer)
            del self._names[dealer]
            dealer.close()
        return self._rows.pop(peer, None)

    def __contains__(self, peer: ev.Peer) -> bool:
        return peer in self._dealers

    def send(self, peer: ev.Peer, message: Message) -> bool:
        """Whether it left. What left may still be lost, with its connection."""
        dealer = self._dealers.get(peer)
        with contextlib.suppress(zmq.ZMQError):
            if dealer is not None:
                self.poller.used(dealer)
                dealer.send(messages.encode(message), zmq.NOBLOCK)
                return True
        return False

    def received(self, ready: list[object]) -> Iterator[tuple[ev.Peer, Message | ValueError]]:
        """What came over these sockets."""
        for dealer in ready:
            for _ in range(BATCH):
                peer = self._names.get(dealer)  # type: ignore[call-overload]
                if peer is None:
                    break
                try:
                    yield peer, messages.decode(self._dealers[peer].recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                except ValueError as error:
                    yield peer, error

    def close(self) -> None:
        self.poller.close()
        self._context.destroy(linger=0)
