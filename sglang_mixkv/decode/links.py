"""A decode rank's links: a socket and a data plane connection for each prefill rank that it reads
from. Both are made and dropped together; a broken data plane connection is reconnected."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.handshake import Row
from sglang_mixkv.channel.messages import Message
from sglang_mixkv.channel.sockets import BATCH, NOBLOCK, Poller, Socket, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.transfer import Peer, peer_of
from sglang_mixkv.draft.copier import Store

logger = logging.getLogger(f"sglang.{__name__}")

CONNECT_S = 5.0


class Link:
    """`memory`: the data plane's peer, None on a rank without a drafter. `reconnecting`: a thread
    is replacing it. `closed`: the link has been given up."""

    def __init__(self, peer: Peer, row: Row, dealer: Socket, memory: Any) -> None:
        self.peer, self.row, self.dealer, self.memory = peer, row, dealer, memory
        self.reconnecting = self.closed = False


class Links:
    """`dial` and `hang_up` may run in any thread; everything else runs in the channel thread.
    `store`: None on a rank without a drafter, which only sends messages."""

    def __init__(self, store: Store | None, times: Times, poller: Poller) -> None:
        self._store, self._times, self._poller = store, times, poller
        self._context = new_context()
        self._links: dict[Peer, Link] = {}
        self._of_dealer: dict[Socket, Link] = {}

    def dial(self, row: Row, server: str) -> Link:
        """Make a link, to be passed to `add` or `hang_up`. It may block. Raises ValueError for an
        address that no prefill rank binds, and OSError if the rank's socket or memory cannot be
        reached. `server`: the bootstrap address of the row's server."""
        _check(row.address)
        dealer, memory = new_socket(self._context, zmq.DEALER, row.address, self._times), None
        try:
            dealer.setsockopt(zmq.IMMEDIATE, 1)  # a send fails if it cannot leave now
            dealer.connect(row.address)
            if not dealer.poll(int(CONNECT_S * 1000), zmq.POLLOUT):
                raise TimeoutError(f"no connection within {CONNECT_S:.0f} s")
            if self._store is not None and not self._store.plane.dead:
                assert row.staging is not None
                self._store.rows.use_device()
                memory = self._store.plane.connect(row.staging.endpoint)
        except BaseException:
            dealer.close()
            raise
        return Link(peer_of(row.instance, server), row, dealer, memory)

    def hang_up(self, link: Link) -> None:
        link.dealer.close()
        link.closed = True  # before `memory` is read, since a reconnect may replace it
        if self._store is not None and link.memory is not None:
            self._store.plane.forget(link.memory)

    def add(self, link: Link) -> None:
        """Add a link, replacing any earlier one to the same peer."""
        self.drop(link.peer)
        self._links[link.peer] = self._of_dealer[link.dealer] = link
        self._poller.register(link.dealer)

    def drop(self, peer: Peer) -> None:
        if (link := self._links.pop(peer, None)) is not None:
            self._poller.unregister(link.dealer)
            del self._of_dealer[link.dealer]
            self.hang_up(link)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._links

    # -- messages

    def send(self, peer: Peer, message: Message) -> bool:
        """Send a message; return whether it was sent. It may still be lost with the connection."""
        link = self._links.get(peer)
        with contextlib.suppress(zmq.ZMQError):
            if link is not None:
                self._poller.used.add(link.dealer)
                link.dealer.send(messages.encode(message), NOBLOCK)
                return True
        return False

    def received(self, ready: Sequence[Any]) -> Iterator[tuple[Peer, Message | ValueError]]:
        """Yield the messages received over these sockets, and a ValueError for each unreadable
        message. Drop the link of a peer that sends a second frame, which no prefill rank does."""
        for dealer in ready:
            if (link := self._of_dealer.get(dealer)) is not None:
                for frame in self._poller.received(dealer, max(1, BATCH // len(ready))):
                    try:
                        if frame.more:
                            self.drop(link.peer)
                            raise ValueError("a message of several frames")
                        yield link.peer, messages.decode(frame.bytes)
                    except ValueError as error:
                        yield link.peer, error
                    if link.closed:
                        break

    # -- reads

    def read(self, action: act.StartRead) -> bool:
        """Start a read; return False if the prefill rank is gone."""
        link, store = self._links.get(action.peer), self._store
        if link is None or link.row.staging is None or store is None:
            return False
        here, there, extents = store.staging, link.row.staging, []
        for segment in action.segments:
            one, heads = segment.announced, segment.transfer.source.heads
            local = here.address + segment.slot * here.slot_bytes
            remote = there.base + one.slot * there.slot_bytes
            extents.append((local, remote, store.rows.packed_bytes(one.count, len(heads))))
        memory = link.memory  # read once, since a reconnect may replace it
        store.plane.start((action, link, memory), memory, extents)
        return True

    def ended(self) -> Iterator[tuple[act.StartRead, str]]:
        """Yield the reads that have ended, each with the reason if it failed. Reconnect broken
        connections in the background, since no backend does so by itself."""
        if self._store is None:
            return
        for (action, link, memory), error in self._store.plane.ended():
            yield action, error
            is_current = link.memory is memory and not self._store.plane.dead
            if error and is_current and not (link.reconnecting or link.closed):
                self._reconnect(link)

    def _reconnect(self, link: Link) -> None:
        """Reconnect in a separate thread, since connecting blocks."""
        link.reconnecting = True
        try:
            threading.Thread(
                target=self._connect_again, args=(link,), name="mixkv-reconnect", daemon=True
            ).start()
        except RuntimeError as error:  # no thread can be started
            self._stays_broken(link, error)

    def _connect_again(self, link: Link) -> None:
        assert self._store is not None
        assert link.row.staging is not None
        plane = self._store.plane
        try:
            self._store.rows.use_device()
            plane.forget(link.memory)
            link.memory = plane.connect(link.row.staging.endpoint)
            if link.closed:
                plane.forget(link.memory)
            link.reconnecting = False
        except Exception as error:
            self._stays_broken(link, error)

    def _stays_broken(self, link: Link, error: Exception) -> None:
        """Leave the link broken until its next read fails."""
        link.reconnecting = False
        logger.warning("[MIXKV-MSG-02] a connection stays broken until the next attempt: %s", error)


def _check(address: str) -> None:
    """Raise ValueError for an address without an IP address and a port."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"expected tcp://IP:PORT, found {address[:100]!r}") from None
