"""The data plane: a decode rank reads slots of a prefill rank's staging buffer.

A rank has one, over a transfer engine of its own beside SGLang's. Its lifetime:

    register(memory)            once; from then on `endpoint`, which travels in the rank's facts
    connect(endpoint) -> peer   in a background thread, since it blocks; once for each user of it
    mend(peer)                  the same, after a read that failed
    start(peer, ...) -> read    in the channel's thread; then `outcome` until it is not None, or
                                `give_up` when the reader has waited long enough
    settled(read)               until True: only then may the local slot be used again
    forget(peer)                a user has done with it
    close()

`start`, `outcome`, `give_up`, `settled` and `forget` never block and never raise. Neither backend
calls back, so whoever started reads polls them, some 2 us each.

A read that was given up goes on: no backend can cancel one. Nor is it bounded in time: the bytes of
a stopped peer land when it continues. So a read is settled when its backend reports its end, and
not before. Every unsettled read is retained here, whether or not its reader still is.

Reads outside either side's memory fail here. Mooncake's TCP would read into memory that was never
registered, and RDMA would end the connection, with all other reads on it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any

import msgspec

logger = logging.getLogger(f"sglang.{__name__}")

CONNECT_S, CLOSE_S, POLL_S = 10.0, 2.0, 1e-3


class Outcome(Enum):
    DONE = "done"
    FAILED = "failed"


class Memory(msgspec.Struct, frozen=True):
    """Slots. `size`: bytes. `device`: a GPU's number, None for host memory."""

    address: int
    size: int
    device: int | None = None

    def holds(self, address: int, length: int) -> bool:
        return length > 0 and self.address <= address <= self.address + self.size - length


class Endpoint(msgspec.Struct, frozen=True):
    """`session`: Mooncake's session, NIXL's metadata. `instance`: of the plane; ports recur."""

    plane: str
    session: bytes
    memory: Memory
    instance: bytes


class Peer:
    """A rank to read from. `link`: the backend's name of it. `reads`: those not settled. `users`:
    how many have connected to it, and not forgotten it; it is `gone` without any."""

    def __init__(self, key: bytes, endpoint: Endpoint) -> None:
        self.key, self.endpoint = key, endpoint
        self.link: str | None = None
        self.users, self.connected, self.gone = 0, False, False
        self.reads: set[Read] = set()
        self.connecting = threading.Lock()


class Read:
    """`ended`: how, by the backend's word; None while bytes may land. `why`: if it failed."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.handle: Any = None
        self.ended: Outcome | None = None
        self.given_up, self.why = False, ""
        self.polling = threading.Lock()


class DataPlane(ABC):
    """It does not call back, so `outcome` has to be asked again and again."""

    name: str

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._spare: int | None = None
        self._endpoint = b""
        self._peers: dict[bytes, Peer] = {}
        self._lock = threading.Lock()

    def register(self, memory: Memory, spare: int | None = None) -> None:
        """Once: this rank's slots. `spare`: the address of a byte of them that means nothing, into
        which `connect` reads; None on a rank that never connects. MixKVError if it is refused."""
        endpoint = Endpoint(self.name, self._register(memory), memory, os.urandom(8))
        self._endpoint = msgspec.msgpack.encode(endpoint)
        self._memory, self._spare = memory, spare

    @property
    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, endpoint: bytes, seconds: float = CONNECT_S) -> Peer:
        """The peer, once a byte of it was read: the same one for all users of an endpoint, mended
        where a read of it had failed. ConnectionError if that fails, ValueError for bytes that are
        no endpoint of this backend."""
        until = time.monotonic() + seconds
        peer = self._take(endpoint, until)
        try:
            self._connect(peer, until)
        except BaseException:
            self.forget(peer)
            raise
        return peer

    def mend(self, peer: Peer, seconds: float = CONNECT_S) -> None:
        """Connect again what a read that failed has found broken. ConnectionError if that fails."""
        try:
            self._connect(peer, time.monotonic() + seconds)
        finally:
            self._let_go(peer)

    def start(self, peer: Peer, local: int, remote: int, length: int) -> Read:
        """`local`, `remote`: addresses. What fails at once is a read that FAILED."""
        read = Read(peer)
        inside = self._memory is not None and self._memory.holds(local, length)
        if not inside or not peer.endpoint.memory.holds(remote, length):
            return _failed(read, "outside the registered memory")
        if peer.gone or not peer.connecting.acquire(blocking=False):
            return _failed(read, "the peer is gone, or being connected")
        try:
            self._begin(read, local, remote, length)
        finally:
            peer.connecting.release()
        return read

    def outcome(self, read: Read) -> Outcome | None:
        """None while it runs. A read that was given up has failed, however it ends."""
        ended = self._poll(read)
        return Outcome.FAILED if read.given_up else ended

    def give_up(self, read: Read) -> None:
        read.given_up = True

    def settled(self, read: Read) -> bool:
        """Whether nothing of it can land in local memory any more."""
        return self._poll(read) is not None

    def forget(self, peer: Peer) -> None:
        """Without another user, new reads from it fail, and what is held for it is released when
        its reads are settled. Until then this endpoint cannot be connected to again; another one
        at its address can."""
        with self._lock:
            peer.users -= 1
            peer.gone = peer.users < 1
        self._let_go(peer)

    def close(self) -> None:
        """End the engine and its threads, when nobody reads or connects any more. Nothing lands
        afterwards, settled or not. Reads in flight get 2 s to end: a peer is better off so."""
        until = time.monotonic() + CLOSE_S
        peers = list(self._peers.values())
        while any(peer.reads for peer in peers) and time.monotonic() < until:
            time.sleep(POLL_S)
            for peer in peers:
                self._poll_all(peer)
        reads = [read for peer in peers for read in list(peer.reads)]
        for read in reads:
            self._release(read)
        self._peers.clear()
        self._close()
        for read in reads:
            _failed(read, "the plane was closed")

    # -- the backend's part

    @abstractmethod
    def _register(self, memory: Memory) -> bytes:
        """The endpoint's target."""

    @abstractmethod
    def _open(self, peer: Peer) -> None:
        """Set `peer.link`, anew if it is set. May block and raise."""

    @abstractmethod
    def _post(self, read: Read, local: int, remote: int, length: int) -> None:
        """Set `read.handle`, and `ended` if it is over. What raises has begun nothing."""

    @abstractmethod
    def _check(self, read: Read) -> Outcome | None:
        """How it ended; not called again then. What raises has ended."""

    @abstractmethod
    def _release(self, read: Read) -> None:
        """Release `read.handle`."""

    @abstractmethod
    def _drop(self, peer: Peer) -> None:
        """Release `peer.link`; nothing of it is in flight."""

    @abstractmethod
    def _close(self) -> None: ...

    # -- peers

    def _decode(self, endpoint: bytes) -> Endpoint:
        try:
            found = msgspec.msgpack.decode(endpoint, type=Endpoint)
        except RecursionError as error:
            raise ValueError("an endpoint that is nested too deeply") from error
        if found.plane != self.name:
            raise ValueError(f"an endpoint of {found.plane!r}, expected {self.name!r}")
        return found

    def _take(self, endpoint: bytes, until: float) -> Peer:
        """With one more user. One that is gone is waited for."""
        while True:
            self._sweep()
            with self._lock:
                peer = self._peers.get(endpoint) or Peer(endpoint, self._decode(endpoint))
                if not peer.gone:
                    peer.users += 1
                    self._peers[endpoint] = peer
                    return peer
            if time.monotonic() > until:
                raise ConnectionError("reads over its former connection have not ended")
            time.sleep(POLL_S)

    def _connect(self, peer: Peer, until: float) -> None:
        with peer.connecting:
            if not peer.connected or peer.gone:
                self._connect_anew(peer, until)

    def _connect_anew(self, peer: Peer, until: float) -> None:
        self._poll_all(peer)
        if peer.gone or peer.reads:
            raise ConnectionError("reads over its former connection have not ended")
        try:
            self._open(peer)
        except Exception as error:
            raise ConnectionError(f"{self.name}: {error}") from error
        while not self._answers(peer, until):
            if time.monotonic() > until:
                raise ConnectionError(f"{self.name}: the peer's memory could not be read")
            time.sleep(POLL_S)
        peer.connected = True

    def _answers(self, peer: Peer, until: float) -> bool:
        """Whether a byte of its memory can be read. It may fail first, once for each socket that
        Mooncake still has to another process at this address."""
        assert self._spare is not None
        read = Read(peer)
        self._begin(read, self._spare, peer.endpoint.memory.address, 1)
        while self._poll(read) is None and time.monotonic() < until:
            time.sleep(POLL_S)
        return read.ended is Outcome.DONE

    def _sweep(self) -> None:
        """Reads that a `connect` left running have nobody else to poll them."""
        for peer in list(self._peers.values()):
            if not peer.gone:
                continue
            self._poll_all(peer)
            self._let_go(peer)

    def _let_go(self, peer: Peer) -> None:
        """Of a peer that is gone, as soon as nothing of it is in flight."""
        if not peer.gone or peer.reads or not peer.connecting.acquire(blocking=False):
            return
        try:
            self._drop(peer)
        except Exception:
            logger.warning("[MIXKV-MSG-02] %s: a peer stays", self.name, exc_info=True)
        finally:
            with self._lock:
                if self._peers.get(peer.key) is peer:
                    del self._peers[peer.key]
            peer.connecting.release()

    # -- reads

    def _begin(self, read: Read, local: int, remote: int, length: int) -> None:
        read.peer.reads.add(read)
        try:
            self._post(read, local, remote, length)
        except Exception as error:
            _failed(read, repr(error))
        if read.ended is not None:
            self._end(read)

    def _poll(self, read: Read) -> Outcome | None:
        with read.polling:
            if read.ended is None:
                try:
                    read.ended = self._check(read)
                except Exception as error:
                    _failed(read, repr(error))
                if read.ended is not None:
                    self._end(read)
            return read.ended

    def _poll_all(self, peer: Peer) -> None:
        for read in list(peer.reads):
            self._poll(read)

    def _end(self, read: Read) -> None:
        self._release(read)
        peer = read.peer
        if read.ended is Outcome.FAILED:
            peer.connected = False
        peer.reads.discard(read)
        self._let_go(peer)


def _failed(read: Read, why: str) -> Read:
    read.ended, read.why = Outcome.FAILED, why
    return read
