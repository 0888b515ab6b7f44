"""The data plane: a decode rank reads slots of a prefill rank's staging buffer.

A rank has one, over a transfer engine of its own beside SGLang's. Its lifetime:

    register(memory)            once; from then on `endpoint`, which travels in the rank's facts
    connect(endpoint) -> peer   in a background thread, since it blocks
    start(tag, peer, extents)   in the channel's thread: one transfer, of many slots
    ended() -> [(tag, error)]   in the channel's thread, again and again
    forget(peer)                its owner is done with it, or reconnects after a read that failed

`start`, `ended` and `forget` never block and never raise. Neither backend calls back, so reads are
polled for their ends, some 2 us each.

A read has ended when its backend reports it, and not before: none can cancel one, and the bytes of
a stopped peer land when it continues. Only then may the local slots be used again. Every read in
flight is retained here, whether or not its reader still is, and its peer with it.

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
from typing import Any

import msgspec

from sglang_mixkv.channel.slot_format import PROBE_OFFSET
from sglang_mixkv.errors import refuse

logger = logging.getLogger(f"sglang.{__name__}")

CONNECT_S, POLL_S, RETRY_S = 10.0, 1e-3, 1e-2


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


def refused(expected: str, found: str) -> Exception:
    """The error of a backend that cannot be made."""
    return refuse(
        "MIXKV-START-06", f"that {expected} beside SGLang's", found, "draft KV cannot be read",
        "See the transport's messages above",
    )  # fmt: skip


Extent = tuple[int, int, int]
"""Bytes to read: the address here, the address there, and how many."""


class Peer:
    """A rank to read from. `link`: the backend's name of it. `reads`: how many are in flight. Once
    it is `gone`, no read starts, and the last one in flight releases it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.link: str | None = None
        self.reads, self.gone = 0, False


class Read:
    """`error`: None while bytes may land, then "" where all are there, or why not. Only the
    thread that started it asks for its end. `failed`: the error that it will end with."""

    def __init__(self, peer: Peer, tag: Any = None) -> None:
        self.peer, self.tag = peer, tag
        self.handle: Any = None
        self.failed = ""
        self.error: str | None = None


class DataPlane(ABC):
    name: str

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._running: list[Read] = []  # the channel thread's
        self._unanswered: tuple[Read, ...] = ()  # probes that a `connect` gave up
        self._lock = threading.Lock()  # to change these, and all peers' `reads` and `gone`
        self.endpoint = b""

    def register(self, memory: Memory) -> None:
        """Register this rank's slots, once. MixKVError if it is refused."""
        endpoint = Endpoint(self.name, self._register(memory), memory, os.urandom(8))
        self.endpoint = msgspec.msgpack.encode(endpoint)
        self._memory = memory

    @property
    def busy(self) -> bool:
        """True if `ended` has not returned the end of every read that was started."""
        return bool(self._running)

    def connect(self, endpoint: bytes, seconds: float = CONNECT_S) -> Peer:
        """Return a peer of the caller's own, once a byte of it was read. ConnectionError if that
        fails, ValueError for bytes that are no endpoint of this backend.

        The first tries may fail: once for each socket that Mooncake still has to another process at
        this address, and while NIXL knows the peer by a broken connection, until the reads over
        that have ended."""
        peer, until = Peer(decode(endpoint, self.name)), time.monotonic() + seconds
        if any(read.peer.endpoint == peer.endpoint for read in self._unanswered):
            raise ConnectionError("it has not answered an earlier connection yet")
        try:
            while not self._answers(peer, until):
                if time.monotonic() > until:
                    raise ConnectionError(f"{self.name}: the peer's memory could not be read")
                time.sleep(RETRY_S)
        except BaseException:
            self.forget(peer)
            raise
        return peer

    def _answers(self, peer: Peer, until: float) -> bool:
        """True if a byte of its memory can be read over a new connection."""
        assert self._memory is not None
        try:
            self._open(peer)
        except Exception as error:
            raise ConnectionError(f"{self.name}: {error}") from error
        read, scratch = Read(peer), self._memory.address + PROBE_OFFSET  # in slot 0's header
        self._begin(read, [(scratch, peer.endpoint.memory.address, 1)])
        while not self._has_ended(read):
            if time.monotonic() > until:
                with self._lock:
                    self._unanswered += (read,)
                return False
            time.sleep(POLL_S)
        return not read.error

    def start(self, tag: Any, peer: Peer, extents: Sequence[Extent]) -> None:
        """Start one transfer. One that fails at once has ended with an error."""
        read = Read(peer, tag)
        self._running.append(read)
        if self._are_inside(peer, extents):
            self._begin(read, extents)
        else:
            read.error = "outside the registered memory"

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
        """Return the reads that have ended since the last call: their tags, and "" if all bytes are
        there, or the error."""
        if self._unanswered:
            answered = [probe for probe in self._unanswered if self._has_ended(probe)]
            with self._lock:
                self._unanswered = tuple(one for one in self._unanswered if one not in answered)
        ended = [read for read in self._running if self._has_ended(read)]
        self._running = [read for read in self._running if read.error is None]
        return [(read.tag, read.error or "") for read in ended]

    def forget(self, peer: Peer) -> None:
        """Let new reads from it fail, and release it when its reads have ended. Idempotent; for any
        thread."""
        with self._lock:
            is_over = not (peer.gone or peer.reads)
            peer.gone = True
        if is_over:
            self._release(peer)

    def _release(self, peer: Peer) -> None:
        try:
            self._drop(peer)
        except Exception:
            logger.warning("[MIXKV-MSG-02] %s: a peer is retained", self.name, exc_info=True)

    # -- reads

    def _begin(self, read: Read, extents: Sequence[Extent]) -> None:
        with self._lock:
            if read.peer.gone:
                read.error = "the peer is gone, or being connected"
                return
            read.peer.reads += 1
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
        read.error, peer = read.failed or error, read.peer
        read.handle = None  # the backend releases it
        with self._lock:
            peer.reads -= 1
            is_over = peer.gone and not peer.reads
        if is_over:
            self._release(peer)

    # -- the backend's part

    @abstractmethod
    def _register(self, memory: Memory) -> bytes:
        """The endpoint's session."""

    @abstractmethod
    def _open(self, peer: Peer) -> None:
        """Set or replace `peer.link`; no read of this peer is in flight. May block and raise."""

    @abstractmethod
    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        """Set `read.handle`. If it raises, only what is in the handle has begun; nothing, if it is
        empty or None."""

    @abstractmethod
    def _check(self, read: Read) -> str | None:
        """Return None while any part of it runs, then "" or the error; not called again then. A
        read whose check raises has ended."""

    @abstractmethod
    def _drop(self, peer: Peer) -> None:
        """Release `peer.link`, if it is set; nothing of it is in flight."""
