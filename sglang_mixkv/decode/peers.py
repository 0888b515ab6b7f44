"""A decode rank's sockets: one DEALER for each prefill rank that it reads from."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import Message
from sglang_mixkv.channel.sockets import Poller, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.draft.facts import Row

BATCH = 64  # messages of one peer between two looks at everything else
CONNECT_S, STEP_MS = 5.0, 50

Dealer = zmq.Socket[bytes]


class Link(NamedTuple):
    """A prefill rank that is connected. `memory`: the data plane's peer, None on a rank without a
    drafter."""

    peer: ev.Peer
    row: Row
    dealer: Dealer
    memory: Any


class Peers:
    """`dial` may run in any thread; everything else is the channel thread's."""

    def __init__(self, times: Times) -> None:
        self._times, self._context = times, new_context()
        self.poller = Poller()
        self._dealers: dict[ev.Peer, Dealer] = {}
        self._names: dict[Dealer, ev.Peer] = {}
        self._lock, self._dials, self._closing = threading.Lock(), 0, False

    def dial(self, address: str) -> Dealer:
        """A socket that is connected. Raises ValueError for what is no address that a prefill rank
        binds, and TimeoutError where nothing answers."""
        _check(address)
        with self._lock:
            if self._closing:
                raise ConnectionError("this rank stops")
            self._dials += 1
        try:
            return self._dial(address)
        finally:
            with self._lock:
                self._dials -= 1

    def _dial(self, address: str) -> Dealer:
        dealer = new_socket(self._context, zmq.DEALER, address, self._times)
        try:
            dealer.setsockopt(zmq.IMMEDIATE, 1)  # what cannot leave now is an error, not a queue
            dealer.connect(address)
            self._wait(dealer)
        except BaseException:
            dealer.close()
            raise
        return dealer

    def _wait(self, dealer: Dealer) -> None:
        until = time.monotonic() + CONNECT_S
        while not dealer.poll(STEP_MS, zmq.POLLOUT):
            if self._closing or time.monotonic() > until:
                raise TimeoutError(f"no connection within {CONNECT_S:.0f} s")

    def add(self, peer: ev.Peer, dealer: Dealer) -> None:
        self.drop(peer)
        self._dealers[peer], self._names[dealer] = dealer, peer
        self.poller.register(dealer)

    def drop(self, peer: ev.Peer) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            self.poller.unregister(dealer)
            del self._names[dealer]
            dealer.close()

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
        """A socket must not be closed while another thread waits for it."""
        with self._lock:
            self._closing = True
        while self._dials:
            time.sleep(STEP_MS / 1000)
        self.poller.close()
        self._context.destroy(linger=0)


def _check(address: str) -> None:
    """A name would be looked up by libzmq's one I/O thread, which all other sockets wait for."""
    scheme, _, rest = address.partition("://")
    host, _, _port = rest.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        found = scheme == "tcp"
    except ValueError:
        found = False
    if not found:
        raise ValueError(f"expected tcp://IP:PORT, found {address[:100]!r}")
