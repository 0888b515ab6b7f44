"""The data planes of the draft channel, between processes: Mooncake over TCP, NIXL as UCX chooses,
and NIXL where UCX has TCP alone.

Each test's body runs in a process of its own, the reader, which forks its peers before either has
an engine. UCX reads the memory of a process on the same host without its help, so that such a
read never waits; tests of waiting run over the other two.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rig.forks import die_with_parent, in_fork

from sglang_mixkv.channel import planes
from sglang_mixkv.channel.data_plane import DataPlane, Extent, Memory, Peer, decode
from sglang_mixkv.channel.nixl import Nixl
from sglang_mixkv.config import PLANE_ENV
from sglang_mixkv.errors import MixKVError

MIB = 1 << 20
SIZE, GUARD, CANARY = 32 * MIB, 4096, 0xA5
LIST = [(GUARD + i * MIB, i * MIB + 777, MIB) for i in range(24)]  # what takes a while
ONE = (GUARD, 0, 10)
PATIENCE_S = 20.0  # for what takes milliseconds on a machine that is not busy
QUIET_S = 0.2  # for what must not happen
FORK = mp.get_context("fork")
LISTEN = "0A"  # in /proc/net/tcp
ENV = {
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "MOONCAKE_PROTOCOL": "tcp",
}
ALL, WAITING = ("mooncake", "nixl", "nixl-tcp"), ("mooncake", "nixl-tcp")


def new_plane(address: int) -> DataPlane:
    plane = planes.make(os.environ[PLANE_ENV], "127.0.0.1", "", {})
    plane.register(Memory(address, SIZE), spare=address)
    return plane


@cache
def pattern(seed: int) -> np.ndarray:
    """A peer's memory."""
    return np.frombuffer(np.random.default_rng(seed).bytes(SIZE), np.uint8)


@dataclass
class Served:
    """A peer's process, from the reader's side."""

    process: Any
    pipe: Any
    seed: int
    endpoint: bytes = b""
    address: int = 0

    def begin(self) -> None:
        self.pipe.send("begin")
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
    """A plane over memory that holds CANARY, and peers whose memory is random. Reads are numbered;
    extents are offsets into both memories, and lengths. `ends`: the errors of those that have
    ended. `then`: their bytes at that time."""

    def __init__(self, way: str, peers: int) -> None:
        self.way = way
        self.peers = [fork_peer(seed) for seed in range(1, peers + 1)]
        self.memory = np.full(SIZE, CANARY, np.uint8)
        self.address = self.memory.ctypes.data
        self.plane = new_plane(self.address)
        self.started: list[tuple[int, tuple[tuple[int, int, int], ...]]] = []
        self.ends: dict[int, str] = {}
        self.then: dict[int, list[np.ndarray]] = {}
        for peer in self.peers:
            peer.begin()

    def connect(self, of: int = 0, seconds: float = PATIENCE_S) -> Peer:
        return self.plane.connect(self.peers[of].endpoint, seconds)

    def start(self, peer: Peer, *extents: tuple[int, int, int], of: int = 0) -> int:
        """It waits for no peer, which would take a stopped one's 30 s."""
        here, there, tag = self.address, self.peers[of].address, len(self.started)
        self.started.append((of, extents))
        began = time.monotonic()
        self.plane.start(tag, peer, [Extent(here + to, there + at, n) for to, at, n in extents])
        assert time.monotonic() - began < PATIENCE_S, "start has blocked"
        return tag

    def look(self) -> None:
        """Each read ends once. All its bytes are there then, if it says so."""
        for tag, error in self.plane.ended():
            assert tag not in self.ends
            self.ends[tag], self.then[tag] = error, self.bytes_of(tag)
            assert error or all(self.landed(tag)), "it has not ended"

    def wait(self, *tags: int, seconds: float = PATIENCE_S) -> list[str | None]:
        """Their errors, "" of those that were right, None of those that run."""
        until = time.monotonic() + seconds
        self.look()
        while not self.ends.keys() >= set(tags) and time.monotonic() < until:
            time.sleep(2e-4)
            self.look()
        return [self.ends.get(tag) for tag in tags]

    def check_read(self, peer: Peer, of: int = 0) -> None:
        """A read that is right."""
        self.memory[GUARD : GUARD + 2 * MIB] = 0
        tag = self.start(peer, (GUARD, 5, MIB), (GUARD + MIB, 99, MIB), of=of)
        assert self.wait(tag) == [""]

    def check_nothing_lands(self, *tags: int) -> None:
        """Of reads that have ended."""
        time.sleep(QUIET_S)
        for tag in tags:
            assert all(map(np.array_equal, self.then[tag], self.bytes_of(tag))), "it had not ended"

    def bytes_of(self, tag: int) -> list[np.ndarray]:
        return [self.memory[to : to + length].copy() for to, _, length in self.started[tag][1]]

    def landed(self, tag: int) -> list[bool]:
        """Of each extent, whether it is there."""
        of, extents = self.started[tag]
        there = [pattern(self.peers[of].seed)[at : at + length] for _, at, length in extents]
        return list(map(np.array_equal, self.bytes_of(tag), there))

    def stop_midway(self, peer: Peer) -> int:
        """Stop the first peer when a part of a list has landed, and not all."""
        begins = np.array([to + byte for to, _, _ in LIST for byte in range(8)])
        for _ in range(100):
            self.memory[:] = CANARY
            tag = self.start(peer, *LIST)
            while (self.memory[begins] == CANARY).all():
                pass
            self.peers[0].stop()
            time.sleep(0.1)  # what was on its way
            self.look()
            if tag not in self.ends and set(self.landed(tag)) == {True, False}:
                return tag
            self.peers[0].go_on()
            assert self.wait(tag) == [""]
        raise AssertionError("no list was stopped midway")


def fork_peer(seed: int) -> Served:
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=serve, args=(theirs, mine, seed), daemon=True)
    process.start()
    theirs.close()
    return Served(process, mine, seed)


def serve(pipe: Any, other: Any, seed: int) -> None:
    """A peer's life: what it is asked to do besides is a function of its own memory."""
    die_with_parent()
    other.close()
    pipe.recv()
    memory = pattern(seed).copy()
    address = memory.ctypes.data
    plane = new_plane(address)
    pipe.send((plane.endpoint, address))
    with suppress(EOFError):
        while True:
            work, *arguments = pipe.recv()
            work(pipe, plane, address, *arguments)


def over(*ways: Any, peers: int = 1) -> Callable[..., Any]:
    """A test whose body runs in the reader's process, over each way."""

    def test_of(body: Callable[[Reader], None]) -> Any:
        @pytest.mark.parametrize("way", ways)
        def test(way: str) -> None:
            failure = in_fork(lambda: read(way, body, peers), lambda _: traceback.format_exc())
            assert failure is None, failure

        return test

    return test_of


def read(way: str, body: Callable[[Reader], None], peers: int) -> None:
    os.environ.pop("MC_TCP_ENABLE_CONNECTION_POOL", None)
    name, _, tcp = way.partition("-")
    os.environ.update(ENV | {PLANE_ENV: name} | ({"UCX_TLS": tcp} if tcp else {}))
    reader = Reader(way, peers)
    try:
        body(reader)
    finally:
        for peer in reader.peers:
            peer.process.kill()


# ---------------------------------------------------------------- bytes


@over(*ALL, peers=2)
def test_bytes_are_right(reader: Reader) -> None:
    """Of many lists at once, of mixed lengths, from two peers, at any offset, side by side."""
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
        assert reader.wait(*tags) == [""] * len(tags)
        assert not reader.plane.busy
        for start, end in [*gaps, (local, SIZE)]:
            assert (reader.memory[start:end] == CANARY).all()
    assert not any(peer.reads for peer in peers)


@over(*ALL)
def test_a_list_of_which_a_part_fails_has_failed_once_all_of_it_has_ended(reader: Reader) -> None:
    """By the peer's word, since it has less memory than its reader believes."""
    peer = reader.connect()
    peer.endpoint = msgspec.structs.replace(
        peer.endpoint, memory=Memory(reader.peers[0].address, 2 * SIZE)
    )
    wrong = (GUARD + 30 * MIB, SIZE - 5, 10)
    reader.peers[0].stop()
    tags = [reader.start(peer, *LIST[:at], wrong, *LIST[at:]) for at in (0, 12, 24)]
    reader.look()
    assert not any(error == "" for error in reader.ends.values())
    assert reader.way != "mooncake" or not reader.ends, "the peer has not looked"
    reader.peers[0].go_on()
    assert all(reader.wait(*tags))
    reader.check_nothing_lands(*tags)
    assert (reader.memory[GUARD + 30 * MIB :] == CANARY).all()
    assert reader.way != "mooncake" or any(reader.landed(tags[0])), "this test shows nothing"
    reader.plane.forget(peer)
    reader.check_read(reader.connect())


# ---------------------------------------------------------------- peers that die, stop, restart


@over(*ALL, peers=2)
def test_a_peer_that_dies_fails_its_own_reads(reader: Reader) -> None:
    lost, other = reader.connect(0), reader.connect(1)
    if reader.way in WAITING:
        first = reader.stop_midway(lost)
    else:
        reader.peers[0].stop()
        first = reader.start(lost, *LIST)
    tags = [first, reader.start(lost, (30 * MIB, 0, MIB))]
    reader.peers[0].kill()
    ends = reader.wait(*tags)
    assert all(ends) if reader.way in WAITING else ends == ["", ""]
    assert all(reader.wait(reader.start(lost, ONE)))
    assert not lost.reads
    reader.check_nothing_lands(first)
    reader.check_read(other, of=1)
    reader.plane.forget(lost)
    with pytest.raises(ConnectionError):
        reader.connect(0, 1)
    reader.check_read(other, of=1)


@over(*WAITING, peers=2)
def test_reads_of_a_stopped_peer_end_when_their_last_byte_has_landed(reader: Reader) -> None:
    """Also of one that is forgotten meanwhile. Another one is read all the time."""
    stopped, other = reader.connect(0), reader.connect(1)
    tags = [reader.stop_midway(stopped)]
    tags += [reader.start(stopped, ((26 + i) * MIB, i * MIB, MIB)) for i in range(3)]
    reader.plane.forget(stopped)
    assert all(reader.wait(reader.start(stopped, ONE), seconds=0))
    late = reader.bytes_of(tags[0])
    for _ in range(20):
        more = (29 * MIB, 0, MIB), (30 * MIB, 9, MIB)
        assert reader.wait(reader.start(other, *more, of=1)) == [""]
    assert reader.wait(*tags, seconds=0) == [None] * 4
    assert all(map(np.array_equal, late, reader.bytes_of(tags[0])))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(reader.connect)
        time.sleep(QUIET_S)
        reader.peers[0].go_on()
        assert reader.wait(*tags) == [""] * 4
        reader.check_nothing_lands(*tags)
        reader.check_read(connecting.result())


@over(*WAITING, peers=2)
def test_connecting_to_a_stopped_peer_holds_up_nobody(reader: Reader) -> None:
    """Where the connection is given up, another one can be made once the peer has answered."""
    other = reader.connect(1)
    reader.peers[0].stop()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(reader.connect, 0, 1)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            reader.check_read(other, of=1)
        reader.peers[0].go_on()
        error = connecting.exception(PATIENCE_S)
    assert isinstance(error, ConnectionError) or (reader.way == "mooncake" and error is None)
    until = time.monotonic() + PATIENCE_S
    while reader.plane._unanswered:
        assert time.monotonic() < until
        reader.look()
    reader.check_read(reader.connect())


def listening_ports(process: int) -> set[int]:
    files = Path(f"/proc/{process}/fd").iterdir()
    mine = {os.readlink(file)[len("socket:[") : -1] for file in files}
    lines = Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]
    sockets = [line.split() for line in lines]
    return {int(s[1].rpartition(":")[2], 16) for s in sockets if s[3] == LISTEN and s[9] in mine}


@over("nixl-tcp", peers=2)
def test_a_host_that_is_off_holds_up_nobody(reader: Reader) -> None:
    """Nothing answers there, as where the queue of a port is full: the kernel asks it for two
    minutes. Its endpoint is the first peer's, with that port."""
    other, known = reader.connect(1), decode(reader.peers[0].endpoint, "nixl")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as filling:
        session, port = known.session, full.getsockname()[1]
        for _ in range(4):
            client = filling.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        for its in listening_ports(reader.peers[0].process.pid):
            session = session.replace(its.to_bytes(2, "big"), port.to_bytes(2, "big"))
        assert session != known.session, "this test shows nothing"
        off = msgspec.msgpack.encode(msgspec.structs.replace(known, session=session))
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(reader.plane.connect, off, 1)
            took = []
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                began = time.monotonic()
                reader.check_read(other, of=1)
                took.append(time.monotonic() - began)
            assert isinstance(connecting.exception(PATIENCE_S), ConnectionError)
        assert max(took) < 1, f"{max(took):.1f} s"


def serve_reads(pipe: Any, plane: DataPlane, address: int, endpoint: bytes, remote: int) -> None:
    """Reads of another peer, begun and not waited for."""
    peer = plane.connect(endpoint, PATIENCE_S)
    pipe.send("connected")
    pipe.recv()
    for i in range(6):
        places = range(i * 4 * MIB, (i + 1) * 4 * MIB, MIB)
        plane.start(i, peer, [Extent(address + at, remote + at, MIB) for at in places])
    pipe.send("begun")


ABORTS = pytest.mark.xfail(strict=True, reason="UCX aborts a peer that meets a dead reader's read")


@over("mooncake", "nixl", pytest.param("nixl-tcp", marks=ABORTS), peers=2)
def test_a_reader_that_dies_leaves_its_peer_alone(reader: Reader) -> None:
    """Of a peer that is stopped, so that it meets the reads when their reader is gone."""
    server, victim = reader.peers
    peer = reader.connect()
    victim.pipe.send((serve_reads, server.endpoint, server.address))
    assert victim.pipe.recv() == "connected"
    server.stop()
    victim.pipe.send("go")
    assert victim.pipe.recv() == "begun"
    victim.kill()
    time.sleep(0.2)
    server.go_on()
    time.sleep(QUIET_S)
    assert server.process.is_alive()
    reader.check_read(peer)


@over(*WAITING)
def test_a_broken_connection_is_made_anew(reader: Reader) -> None:
    """Mooncake uses its four to a peer again, and meets those that broke one by one. NIXL has one
    for all that name the same rank, as another server may that is idle meanwhile."""
    peer, idle = reader.connect(), reader.connect()
    for _ in range(2):
        assert reader.wait(reader.start(peer, *LIST)) == [""]
        assert shut_sockets() > 0
        time.sleep(0.2)
        assert all(reader.wait(reader.start(peer, ONE)))
        reader.plane.forget(peer)
        peer = reader.connect()
        assert reader.wait(reader.start(peer, *LIST)) == [""]
        assert reader.wait(reader.start(idle, *LIST)) == [""]


@over(*ALL)
def test_endpoints(reader: Reader) -> None:
    """Two servers may name the same rank, and a rank is connected to anew while it is in use: who
    forgets it takes it from nobody else."""
    one, two = reader.connect(), reader.connect()
    reader.check_read(one)
    reader.plane.forget(one)
    reader.plane.forget(one)
    reader.check_read(two)
    assert all(reader.wait(reader.start(one, ONE), seconds=0))
    other = {"mooncake": mooncake_names_each_instance, "nixl": nixl_is_refused}
    other.get(reader.way, lambda *_: None)(reader, two)
    known = two.endpoint
    of_another = msgspec.msgpack.encode(msgspec.structs.replace(known, plane="x"))
    for wrong in (b"", b"nonsense", of_another):
        with pytest.raises(ValueError, match=r"xpected|truncated"):
            reader.plane.connect(wrong)
    gone = msgspec.structs.replace(known, session=b"127.0.0.1:1")
    with pytest.raises(ConnectionError):
        reader.plane.connect(msgspec.msgpack.encode(gone), 1)
    reader.check_read(reader.connect())


def mooncake_names_each_instance(reader: Reader, first: Peer) -> None:
    """What Mooncake knows of a name it never asks for again."""
    other = msgspec.structs.replace(first.endpoint, instance=b"another one")
    second = reader.plane.connect(msgspec.msgpack.encode(other))
    assert len({first.link, second.link, reader.connect().link}) == 2
    reader.check_read(second)
    with pytest.raises(MixKVError, match="MIXKV-START-06"):  # that memory is registered
        reader.plane.register(Memory(reader.address, SIZE), spare=reader.address)


def nixl_is_refused(reader: Reader, _: Peer) -> None:
    with pytest.raises(MixKVError, match="MIXKV-START-06"):
        Nixl("no such backend")
    with pytest.raises(MixKVError, match="MIXKV-START-06"):
        Nixl().register(Memory(reader.address, SIZE, device=0))


def shut_sockets() -> int:
    """This process's TCP connections."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as mine:
            if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername():
                mine.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
