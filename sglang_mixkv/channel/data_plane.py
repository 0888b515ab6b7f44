"""The data plane: a decode rank reads slots of a prefill rank's staging buffer.

A rank has one, over a transfer engine of its own beside SGLang's. Its lifetime:

    register(memory)            once; from then on `endpoint`, which travels in the rank's facts
    connect(endpoint) -> peer   in a background thread, since it blocks; once for each user of it
    mend(peer)                  the same, after a read that failed
    start(tag, peer, extents)   in the channel's thread: one transfer, of many slots
    ended() -> [(tag, error)]   in the channel's thread, again and again
    forget(peer)                one user of it is done
    close()

`start`, `ended` and `forget` never block and never raise. Neither backend calls back, so whoever
started reads asks for their ends, some 2 us each.

A read has ended when its backend reports it, and not before: none can cancel one, and the bytes of
a stopped peer land when it continues. Only then may the local slots be used again. Every read in
flight is retained here, whether or not its reader still is.

Reads outside either side's memory fail here. Mooncake's TCP would read into memory that was never
registered, and RDMA would end the connection, with all other reads on it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

logger = logging.getLogger(f"sglang.{__name__}")

CONNECT_S, CLOSE_S, POLL_S = 10.0, 2.0, 1e-3


class Memory(msgspec.Struct, frozen=True):
    """Slots. `size`: bytes. `device`: a GPU's number, None for host memory."""

    address: int
    size: int
    device: int | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """`session`: Mooncake's session, NIXL's metadata. `instance`: of the plane; ports recur."""

    plane: str
    session: bytes
    memory: Memory
    instance: bytes


def decode(endpoint: bytes, plane: str) -> Endpoint:
    """Raises ValueError for bytes that are no endpoint of this plane."""
    try:
        found = msgspec.msgpack.decode(endpoint, type=Endpoint)
    except RecursionError as error:
        raise ValueError("an endpoint that is nested too deeply") from error
    if found.plane != plane:
        raise ValueError(f"an endpoint of {found.plane!r}, expected {plane!r}")
    return found


class Extent(NamedTuple):
    """Bytes to read. `local`, `remote`: addresses."""

    local: int
    remote: int
    length: int


class Peer:
    """A rank to read from. `link`: the backend's name of it. `reads`: those in flight. `users`: how
    many have connected to it, and not forgotten it; it is `gone` without any."""

    def __init__(self, key: bytes, endpoint: Endpoint) -> None:
        self.key, self.endpoint = key, endpoint
        self.link: str | None = None
        self.connected = self.gone = False
        self.users = 0
        self.reads: set[Read] = set()
        self.connecting = threading.Lock()


class Read:
    """`error`: None while bytes may land, then "" where all are there, or why not. Only the
    thread that started it asks for its end. `failed`: the error that it will end with."""

    def __init__(self, peer: Peer, tag: Any = None) -> None:
        self.peer, self.tag = peer, tag
        self.handle: Any = None
        self.failed = ""
        self.error: str | None = None


class DataPlane(ABC):
    """It has no callbacks, so `ended` has to be called again and again."""

    name: str

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._spare: int | None = None
        self._endpoint = b""
        self._peers: dict[bytes, Peer] = {}
        self._running: list[Read] = []  # the channel thread's
        self._probes: list[Read] = []  # those that a `connect` left running
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

    @property
    def busy(self) -> bool:
        """Whether a read was started whose end `ended` has not returned."""
        return bool(self._running)

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

    def start(self, tag: Any, peer: Peer, extents: Sequence[Extent]) -> None:
        """One transfer. What fails at once has ended with an error."""
        read = Read(peer, tag)
        self._running.append(read)
        if not self._are_inside(peer, extents):
            read.error = "outside the registered memory"
        elif peer.gone or not peer.connecting.acquire(blocking=False):
            read.error = "the peer is gone, or being connected"
        else:
            try:
                self._begin(read, extents)
            finally:
                peer.connecting.release()

    def _are_inside(self, peer: Peer, extents: Sequence[Extent]) -> bool:
        here, there = self._memory, peer.endpoint.memory
        if here is None:
            return False
        for local, remote, length in extents:
            at, there_at = local - here.address, remote - there.address
            if length <= 0 or at < 0 or at + length > here.size:
                return False
            if there_at < 0 or there_at + length > there.size:
                return False
        return True

    def ended(self) -> list[tuple[Any, str]]:
        """The reads that have ended since it was asked last: their tags, and "" where all bytes are
        there, or why they are not."""
        if not self._running:
            return []
        running, found = [], []
        for read in self._running:
            if self._has_ended(read):
                found.append((read.tag, read.error or ""))
            else:
                running.append(read)
        self._running = running
        return found

    def forget(self, peer: Peer) -> None:
        """Without another user, new reads from it fail, and what is held for it is released when
        its reads have ended. Until then this endpoint cannot be connected to again; another one at
        its address can."""
        with self._lock:
            peer.users -= 1
            peer.gone = peer.users < 1
        self._let_go(peer)

    def close(self) -> None:
        """End the engine and its threads, when nobody reads or connects any more. Nothing lands
        afterwards, ended or not. Reads in flight get 2 s to end: a peer is better off so."""
        reads, until = [*self._running, *self._probes], time.monotonic() + CLOSE_S
        while reads and time.monotonic() < until:
            reads = [read for read in reads if not self._has_ended(read)]
            time.sleep(POLL_S if reads else 0)
        self._peers.clear()
        for read in reads:
            self._end(read, "the plane was closed")
        self._close()

    # -- the backend's part

    @abstractmethod
    def _register(self, memory: Memory) -> bytes:
        """The endpoint's target."""

    @abstractmethod
    def _open(self, peer: Peer) -> None:
        """Set `peer.link`, anew if it is set. May block and raise."""

    @abstractmethod
    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        """Set `read.handle`. What raises has begun what is in that, and nothing where it is empty
        or None."""

    @abstractmethod
    def _check(self, read: Read) -> str | None:
        """None while any part of it runs, then "" or why it failed; not called again then. What
        raises has ended."""

    @abstractmethod
    def _drop(self, peer: Peer) -> None:
        """Release `peer.link`; nothing of it is in flight."""

    @abstractmethod
    def _close(self) -> None: ...

    # -- peers

    def _take(self, endpoint: bytes, until: float) -> Peer:
        """The endpoint's peer, with one more user. Waits for a former one to be released."""
        while True:
            self._sweep()
            with self._lock:
                peer = self._peers.get(endpoint) or Peer(endpoint, decode(endpoint, self.name))
                if not peer.gone:
                    peer.users += 1
                    self._peers[endpoint] = peer
                    return peer
            if time.monotonic() > until:
                raise ConnectionError("reads over its former connection have not ended")
            time.sleep(POLL_S)

    def _connect(self, peer: Peer, until: float) -> None:
        with peer.connecting:
            if peer.connected and not peer.gone:
                return
            while peer.reads and not peer.gone and time.monotonic() < until:
                time.sleep(POLL_S)  # the other reads end in the channel's thread
                self._sweep()
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
        self._begin(read, [Extent(self._spare, peer.endpoint.memory.address, 1)])
        while not self._has_ended(read):
            if time.monotonic() > until:
                with self._lock:
                    self._probes.append(read)
                return False
            time.sleep(POLL_S)
        return read.error == ""

    def _sweep(self) -> None:
        """Ask for the ends of probes that a `connect` left running: nobody else does. The lock is
        not held meanwhile: a probe that ends may release its peer, which takes the lock."""
        with self._lock:
            probes, self._probes = self._probes, []
        running = [read for read in probes if not self._has_ended(read)]
        with self._lock:
            self._probes += running

    def _let_go(self, peer: Peer) -> None:
        """Release a peer that is gone, as soon as none of its reads is in flight."""
        if not peer.gone or peer.reads or not peer.connecting.acquire(blocking=False):
            return
        try:
            if self._peers.get(peer.key) is not peer:
                return  # it was let go before: its endpoint may have another peer
            try:
                self._drop(peer)
            except Exception:
                logger.warning("[MIXKV-MSG-02] %s: a peer is retained", self.name, exc_info=True)
            with self._lock:
                self._peers.pop(peer.key, None)
        finally:
            peer.connecting.release()

    # -- reads

    def _begin(self, read: Read, extents: Sequence[Extent]) -> None:
        read.peer.reads.add(read)
        try:
            self._post(read, extents)
        except Exception as error:
            read.failed = repr(error)
            if not read.handle:
                self._end(read, "")

    def _has_ended(self, read: Read) -> bool:
        if read.error is None:
            try:
                error = self._check(read)
            except Exception as raised:
                error = repr(raised)
            if error is not None:
                self._end(read, error)
        return read.error is not None

    def _end(self, read: Read, error: str) -> None:
        read.error = read.failed or error
        read.handle = None  # the backend releases it
        peer = read.peer
        peer.connected = peer.connected and not read.error
        peer.reads.discard(read)
        if peer.gone:
            self._let_go(peer)
