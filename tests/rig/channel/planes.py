"""Processes that read each other's memory over a data plane of the draft channel.

Each test's body runs in its own process, the reader. It forks its peers before any process makes an
engine.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from rig.process.forks import STRETCH, die_with_parent, in_fork

from sglang_mixkv.channel import planes
from sglang_mixkv.channel.data_plane import DataPlane, Memory, RemoteMemory
from sglang_mixkv.channel.nixl import Nixl
from sglang_mixkv.errors import MixKVError

MIB = 1 << 20
SIZE, GUARD, CANARY = 32 * MIB, 4096, 0xA5
LIST = [(GUARD + i * MIB, i * MIB + 777, MIB) for i in range(24)]  # a long read
ONE = (GUARD, 0, 10)
PATIENCE_S = 20.0 * STRETCH  # limit of operations that take milliseconds on an idle machine
QUIET_S = 0.2  # how long to check that nothing happens
FORK = mp.get_context("fork")
ENV = {
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
}


class Place(NamedTuple):
    """A rank's address, and its RDMA devices."""

    host: str = "127.0.0.1"
    devices: str = ""


class Way(NamedTuple):
    """A data plane, its environment in addition to ENV, and the places of a reader and its
    peers."""

    plane: str
    env: Mapping[str, str] = {}
    reader: Place = Place()
    peer: Place = Place()


TCP = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}
V6 = Place("::1")
WAYS = {
    "mooncake": Way("mooncake", TCP),
    "mooncake-6": Way("mooncake", {**TCP, "MC_USE_IPV6": "1"}, V6, V6),
    "nixl": Way("nixl"),
    "nixl-tcp": Way("nixl", {"UCX_TLS": "tcp"}),
}


def new_plane(address: int, way: Way, place: Place) -> DataPlane:
    plane = planes.make(way.plane, place.host, place.devices, {})
    plane.register(Memory(address, SIZE))
    return plane


@cache
def pattern(seed: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(SIZE), np.uint8)


@dataclass
class Served:
    """The reader's handle of a peer process."""

    process: Any
    pipe: Any
    seed: int
    endpoint: bytes = b""
    address: int = 0

    def begin(self, **env: str) -> None:
        self.pipe.send(env)
        self.endpoint, self.address = self.pipe.recv()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Reader:
    """A data plane whose memory is filled with CANARY, and peers whose memory is random. Reads are
    numbered; an extent is a local offset, a remote offset and a length. `ends`: the errors of ended
    reads. `then`: their bytes when they ended. `later`: the number of further peers that the test
    starts itself."""

    def __init__(self, way: str, peers: int, later: int = 0) -> None:
        self.way, of = way, WAYS[way]
        self.peers = [fork_peer(seed, of) for seed in range(1, peers + later + 1)]
        self.memory = np.full(SIZE, CANARY, np.uint8)
        self.address = self.memory.ctypes.data
        self.plane = new_plane(self.address, of, of.reader)
        self.started: list[tuple[int, tuple[tuple[int, int, int], ...]]] = []
        self.ends: dict[int, str] = {}
        self.then: dict[int, list[np.ndarray]] = {}
        for peer in self.peers[:peers]:
            peer.begin()

    def connect(self, of: int = 0, seconds: float = PATIENCE_S) -> RemoteMemory:
        return self.plane.connect(self.peers[of].endpoint, seconds)

    def start(self, peer: RemoteMemory, *extents: tuple[int, int, int], of: int = 0) -> int:
        """Start a read. The start must not wait for a stopped peer, which would take 30 s."""
        here, there, tag = self.address, self.peers[of].address, len(self.started)
        self.started.append((of, extents))
        began = time.monotonic()
        self.plane.start(tag, peer, [(here + to, there + at, n) for to, at, n in extents])
        assert time.monotonic() - began < PATIENCE_S, "start has blocked"
        return tag

    def look(self) -> None:
        """Poll for ended reads. Each must end once, and without an error all its bytes must have
        arrived."""
        for tag, error in self.plane.ended():
            assert tag not in self.ends
            self.ends[tag], self.then[tag] = error, self.bytes_of(tag)
            assert error or all(self.landed(tag)), "the read ended before all its bytes arrived"

    def wait(self, *tags: int, seconds: float = PATIENCE_S) -> list[str | None]:
        """Wait for reads. Return their errors: "" for success, None if still in flight."""
        until = time.monotonic() + seconds
        self.look()
        while not self.ends.keys() >= set(tags) and time.monotonic() < until:
            time.sleep(2e-4)
            self.look()
        return [self.ends.get(tag) for tag in tags]

    def check_read(self, peer: RemoteMemory, of: int = 0) -> None:
        """Check that a read is correct."""
        self.memory[GUARD : GUARD + 2 * MIB] = 0
        tag = self.start(peer, (GUARD, 5, MIB), (GUARD + MIB, 99, MIB), of=of)
        assert self.wait(tag) == [""]

    def check_nothing_lands(self, *tags: int) -> None:
        """Check that no byte arrives after these reads have ended."""
        time.sleep(QUIET_S)
        for tag in tags:
            assert all(map(np.array_equal, self.then[tag], self.bytes_of(tag))), (
                "bytes arrived late"
            )

    def bytes_of(self, tag: int) -> list[np.ndarray]:
        return [self.memory[to : to + length].copy() for to, _, length in self.started[tag][1]]

    def landed(self, tag: int) -> list[bool]:
        """Return, for each extent, whether all its bytes have arrived."""
        of, extents = self.started[tag]
        there = [pattern(self.peers[of].seed)[at : at + length] for _, at, length in extents]
        return list(map(np.array_equal, self.bytes_of(tag), there))

    def stop_midway(self, peer: RemoteMemory) -> int:
        """Stop the first peer when only a part of a list has arrived, and return the read's
        number."""
        begins = np.array([to + byte for to, _, _ in LIST for byte in range(8)])
        for _ in range(100):
            self.memory[:] = CANARY
            tag = self.start(peer, *LIST)
            while (self.memory[begins] == CANARY).all():
                pass
            self.peers[0].stop()
            time.sleep(0.1)  # for bytes in flight
            self.look()
            if tag not in self.ends and set(self.landed(tag)) == {True, False}:
                return tag
            self.peers[0].go_on()
            assert self.wait(tag) == [""]
        raise AssertionError("no list was stopped midway")


def fork_peer(seed: int, way: Way) -> Served:
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=serve, args=(theirs, mine, seed, way), daemon=True)
    process.start()
    theirs.close()
    return Served(process, mine, seed)


def serve(pipe: Any, other: Any, seed: int, way: Way) -> None:
    """Run a peer, which calls the functions that it receives, with its own memory."""
    die_with_parent()
    other.close()
    os.environ.update(pipe.recv())
    memory = pattern(seed).copy()
    address = memory.ctypes.data
    plane = new_plane(address, way, way.peer)
    pipe.send((plane.endpoint, address))
    with suppress(EOFError):
        while True:
            work, *arguments = pipe.recv()
            work(pipe, plane, address, *arguments)


def over(*ways: Any, peers: int = 1, later: int = 0) -> Callable[..., Any]:
    """Make a test whose body runs in a reader process, once per way."""

    def test_of(body: Callable[[Reader], None]) -> Any:
        @pytest.mark.parametrize("way", ways)
        def test(way: str) -> None:
            life = partial(read, way, body, peers, later)
            failure = in_fork(life, lambda _: traceback.format_exc())
            assert failure is None, failure

        test.body = body  # type: ignore[attr-defined]
        return test

    return test_of


def go(way: str) -> Way:
    return enter(WAYS[way])


def enter(way: Way) -> Way:
    """Set this way's environment variables in this process."""
    for name in (
        "MC_TCP_ENABLE_CONNECTION_POOL",
        "MC_FORCE_TCP",
        "MOONCAKE_PROTOCOL",
        "UCX_TLS",
        "MC_USE_IPV6",
    ):
        os.environ.pop(name, None)
    os.environ.update({**ENV, **way.env})
    return way


def read(way: str, body: Callable[[Reader], None], peers: int, later: int = 0) -> None:
    go(way)
    reader = Reader(way, peers, later)
    try:
        body(reader)
    finally:
        for peer in reader.peers:
            peer.process.kill()


def check_bytes(reader: Reader) -> None:
    """Read many lists concurrently from two peers, with different lengths and offsets."""
    peers = [reader.connect(0), reader.connect(1)]
    random = np.random.default_rng(0)
    sizes = (1, 2, 7, 64, 4095, 4096, 65_537, MIB, MIB + 13) * 4
    for most in (1, 2, 8, 36):
        reader.memory[:] = CANARY
        local, gaps, tags, extents = GUARD, [(0, GUARD)], [], []
        for length in random.permutation(sizes).tolist():
            extents.append((local, int(random.integers(SIZE - length)), length))
            gaps.append((local + length, local + length + GUARD))
            local += length + GUARD
        while extents:
            of, count = len(tags) % 2, int(random.integers(most)) + 1
            tags.append(reader.start(peers[of], *extents[:count], of=of))
            del extents[:count]
        assert reader.plane.busy
        ends = reader.wait(*tags)
        assert ends == [""] * len(tags), ends
        assert not reader.plane.busy
        for start, end in [*gaps, (local, SIZE)]:
            assert (reader.memory[start:end] == CANARY).all()
    assert not any(peer.reads for peer in peers)


def check_endpoints(reader: Reader) -> None:
    """Check that forgetting one connection to a rank leaves another one usable: two servers may
    publish the same rank, and a rank may be reconnected while it is in use."""
    one, two = reader.connect(), reader.connect()
    reader.check_read(one)
    reader.plane.forget(one)
    reader.plane.forget(one)
    reader.check_read(two)
    assert all(reader.wait(reader.start(one, ONE), seconds=0))
    other = {"mooncake": mooncake_names_each_instance, "nixl": nixl_is_refused}
    other[reader.plane.name](reader, two)
    known = two.endpoint
    of_another = msgspec.msgpack.encode(msgspec.structs.replace(known, plane="x"))
    for wrong in (b"", b"nonsense", of_another):
        with pytest.raises(ValueError, match=r"xpected|truncated"):
            reader.plane.connect(wrong)
    gone = msgspec.structs.replace(known, session=f"{WAYS[reader.way].peer.host}:1".encode())
    with pytest.raises(ConnectionError):
        reader.plane.connect(msgspec.msgpack.encode(gone), 1)
    reader.check_read(reader.connect())


def mooncake_names_each_instance(reader: Reader, first: RemoteMemory) -> None:
    """Check that each instance has its own name, since Mooncake caches its information about a
    name."""
    other = msgspec.structs.replace(first.endpoint, instance=b"another one")
    second = reader.plane.connect(msgspec.msgpack.encode(other))
    assert len({first.name, second.name, reader.connect().name}) == 2
    reader.check_read(second)
    with pytest.raises(MixKVError, match="MIXKV-START-06"):  # already registered
        reader.plane.register(Memory(reader.address, SIZE))


def nixl_is_refused(reader: Reader, _: RemoteMemory) -> None:
    with pytest.raises(MixKVError, match="MIXKV-START-06"):
        Nixl("no such backend")
    with pytest.raises(MixKVError, match="MIXKV-START-06"):
        Nixl().register(Memory(reader.address, SIZE, device=0))
