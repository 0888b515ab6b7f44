"""The data plane: a decode rank reads slots of a prefill rank's staging buffer.

Each rank has a data plane, with a transfer engine of its own beside SGLang's. The calls:

    register(memory)            once; sets `endpoint`, which travels in the rank's facts
    connect(endpoint) -> peer   in a background thread, since it blocks
    start(tag, peer, extents)   in the channel's thread: starts one transfer of many slots
    ended() -> [(tag, error)]   in the channel's thread, repeatedly
    forget(peer)                when the link to the peer ends, or is replaced after a failed read

`start`, `ended` and `forget` never block or raise. Neither backend has completion callbacks, so
reads are polled, which takes some 2 us each time.

A read ends only when its backend reports so: neither backend can cancel a read, and the bytes of a
stopped peer land when the peer continues. The local slots may be reused only after the read's end.
The data plane retains every read in flight, with its peer, even if the read's owner is gone.

Reads outside either side's registered memory fail here and never reach a backend: the backends
handle them differently, and over RDMA one such read fails all others on the connection.
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

from sglang_mixkv.draft.slot_format import PROBE_OFFSET
from sglang_mixkv.errors import refuse

logger = logging.getLogger(f"sglang.{__name__}")

CONNECT_S, POLL_S, RETRY_S = 10.0, 1e-3, 1e-2


class Memory(msgspec.Struct, frozen=True):
    """The memory of a rank's slots, `size` bytes. `device`: the GPU's index, None for the host."""

    address: int
    size: int
    device: int | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """`session`: Mooncake's, or NIXL's agent metadata. `instance`: random, as ports are reused."""

    plane: str
    session: bytes
    memory: Memory
    instance: bytes


def decode(endpoint: bytes, plane: str) -> Endpoint:
    """Decode an endpoint. Raises ValueError if it does not belong to this plane."""
    try:
        found = msgspec.msgpack.decode(endpoint, type=Endpoint)
    except RecursionError as error:
        raise ValueError("the endpoint is nested too deeply") from error
    if found.plane != plane:
        raise ValueError(f"an endpoint of {found.plane!r}, expected {plane!r}")
    return found


def refused(expected: str, found: str) -> Exception:
    """Return the error for a backend that cannot start."""
    expected, consequence = f"{expected} beside SGLang's", "draft KV cannot be read"
    remedy = "See the transport's messages above"
    return refuse("MIXKV-START-06", expected, found, consequence, remedy)


Extent = tuple[int, int, int]
"""A range to read: its local address, remote address and length."""


class RemoteMemory:
    """A rank to read from. `name`: the backend's name for it. `reads`: how many are in flight.
    `gone`: no read may start, and the end of the last read releases the peer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name: str | None = None
        self.reads, self.gone = 0, False


class Read(msgspec.Struct, eq=False):
    """`error`: None while bytes may land; then "" for a success, or the error. `failed`: the error
    to report at the end. Only the thread that started a read checks whether it has ended."""

    peer: RemoteMemory
    tag: Any = None
    handle: Any = None
    failed: str = ""
    error: str | None = None


class DataPlane(ABC):
    name: str
    dead = False  # once True, no read starts

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._running: list[Read] = []  # used by the channel thread alone
        self._unanswered: tuple[Read, ...] = ()  # probes that `connect` gave up on
        self._lock = threading.Lock()  # for changes to `_unanswered` and to peers
        self.endpoint = b""

    def register(self, memory: Memory) -> None:
        """Register this rank's slots; call it once. Raises MixKVError if the backend refuses."""
        endpoint = Endpoint(self.name, self._register(memory), memory, os.urandom(8))
        self.endpoint = msgspec.msgpack.encode(endpoint)
        self._memory = memory

    @property
    def busy(self) -> bool:
        """True while `ended` has yet to return a read that was started."""
        return bool(self._running)

    def connect(self, endpoint: bytes, seconds: float = CONNECT_S) -> RemoteMemory:
        """Connect to a peer, and return it once a byte of its memory has been read. Raises
        ConnectionError if that fails, and ValueError if `endpoint` is not one of this backend.

        First attempts may fail: with Mooncake, once per socket still open to an earlier process at
        this address; with NIXL, until reads over a broken connection to the peer have ended."""
        peer, until = RemoteMemory(decode(endpoint, self.name)), time.monotonic() + seconds
        if any(read.peer.endpoint == peer.endpoint for read in self._unanswered):
            raise ConnectionError("the peer has not answered an earlier connection")
        try:
            while not self._answers(peer, until):
                if time.monotonic() > until:
                    raise ConnectionError(f"{self.name}: the peer's memory could not be read")
                time.sleep(RETRY_S)
        except BaseException:
            self.forget(peer)
            raise
        return peer

    def _answers(self, peer: RemoteMemory, until: float) -> bool:
        """Connect to the peer, and return whether a byte of its memory can be read."""
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

    def start(self, tag: Any, peer: RemoteMemory, extents: Sequence[Extent]) -> None:
        """Start one transfer. If it fails immediately, `ended` returns its error."""
        read = Read(peer, tag)
        self._running.append(read)
        if self._are_inside(peer, extents):
            self._begin(read, extents)
        else:
            read.error = "outside the registered memory"

    def _are_inside(self, peer: RemoteMemory, extents: Sequence[Extent]) -> bool:
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
        """Return tag and error ("" for a success) of each read that ended since the last call."""
        if self._unanswered:
            answered = [probe for probe in self._unanswered if self._has_ended(probe)]
            with self._lock:
                self._unanswered = tuple(one for one in self._unanswered if one not in answered)
        found = list[tuple[Any, str]]()
        for read in list(self._running):
            if self._has_ended(read):
                self._running.remove(read)
                found.append((read.tag, read.error or ""))
        return found

    def forget(self, peer: RemoteMemory) -> None:
        """Make new reads from the peer fail, and release it once its last read has ended.
        Idempotent; any thread may call it."""
        with self._lock:
            is_over = not (peer.gone or peer.reads)
            peer.gone = True
        if is_over:
            self._release(peer)

    def _release(self, peer: RemoteMemory) -> None:
        try:
            self._drop(peer)
        except Exception:
            logger.warning("[MIXKV-MSG-02] %s: a peer was not released", self.name, exc_info=True)

    # -- reads

    def _begin(self, read: Read, extents: Sequence[Extent]) -> None:
        with self._lock:
            if read.peer.gone or self.dead:
                read.error = "the peer is gone or being connected"
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
        read.handle = None  # so that the backend releases the handle
        with self._lock:
            peer.reads -= 1
            is_over = peer.gone and not peer.reads
        if is_over:
            self._release(peer)

    # -- implemented by each backend

    @abstractmethod
    def _register(self, memory: Memory) -> bytes:
        """Register the memory, and return the endpoint's session."""

    @abstractmethod
    def _open(self, peer: RemoteMemory) -> None:
        """Set or replace `peer.name`. No read from the peer is in flight. May block or raise."""

    @abstractmethod
    def _post(self, read: Read, extents: Sequence[Extent]) -> None:
        """Start the read and set `read.handle`. If this raises, only the transfers in the handle
        have started: none if the handle is empty or None."""

    @abstractmethod
    def _check(self, read: Read) -> str | None:
        """Return None while any part of the read is in flight. Any other result is the last: the
        error, or "" for a success. An exception also ends the read."""

    @abstractmethod
    def _drop(self, peer: RemoteMemory) -> None:
        """Release `peer.name` if it is set. No read from the peer is in flight."""
