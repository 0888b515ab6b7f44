"""The data planes of the draft channel, between processes: Mooncake over TCP, NIXL as UCX chooses,
and NIXL where UCX has TCP alone.

Each test's body runs in a process of its own, the reader, which forks its peers before either has
an engine. UCX reads the memory of a process on the same host without its help, so that such a
read never waits; tests of waiting run over the other two.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang_mixkv.channel.data_plane import DataPlane, Endpoint, Memory, Outcome, Peer, Read
from sglang_mixkv.errors import MixKVError

MIB = 1 << 20
SIZE, GUARD, CANARY = 8 * MIB, 4096, 0xA5
PATIENCE_S = 20.0  # for what takes milliseconds on a machine that is not busy
FORK = mp.get_context("fork")
ENV = {
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "MOONCAKE_PROTOCOL": "tcp",
}
ALL, WAITING = ("mooncake", "nixl", "nixl-tcp"), ("mooncake", "nixl-tcp")
Body = Callable[["Reader"], None]


def new_plane(way: str) -> DataPlane:
    if way == "mooncake":
        from sglang_mixkv.channel.mooncake import Mooncake

        return Mooncake("127.0.0.1")
    from sglang_mixkv.channel.nixl import Nixl

    return Nixl()


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

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Reader:
    """A plane over memory that holds CANARY, and peers whose memory is random. `later`: how many of
    them have no plane yet."""

    def __init__(self, way: str, seeds: int, later: int) -> None:
        self.way, self.peers = way, [fork_peer(way, seed) for seed in range(1, seeds + later + 1)]
        self.tasks = threads()
        self.plane = new_plane(way)
        self.memory = np.full(SIZE, CANARY, np.uint8)
        self.address = self.memory.ctypes.data
        self.plane.register(Memory(self.address, SIZE), spare=self.address)
        for peer in self.peers[:seeds]:
            peer.begin()

    def connect(self, number: int = 0) -> Peer:
        return self.plane.connect(self.peers[number].endpoint, PATIENCE_S)

    def start(self, peer: Peer, local: int, remote: int, length: int, of: int = 0) -> Read:
        """Offsets into the memories; the call may take no longer than a copy."""
        began = time.monotonic()
        here, there = self.address + local, self.peers[of].address + remote
        read = self.plane.start(peer, here, there, length)
        assert time.monotonic() - began < 1, "start has blocked"
        return read

    def outcome(self, read: Read, within: float = PATIENCE_S) -> Outcome | None:
        until = time.monotonic() + within
        while (outcome := self.plane.outcome(read)) is None and time.monotonic() < until:
            time.sleep(2e-4)
        return outcome

    def check_read(self, peer: Peer, of: int = 0, length: int = MIB) -> None:
        """A read that is right."""
        self.memory[GUARD : GUARD + length] = 0
        read = self.start(peer, GUARD, 12345, length, of)
        assert self.outcome(read) is Outcome.DONE, read.why
        assert self.holds(self.peers[of].seed, GUARD, 12345, length)

    def holds(self, seed: int, local: int, remote: int, length: int) -> bool:
        found, expected = self.memory[local : local + length], pattern(seed)
        return bool((found == expected[remote : remote + length]).all())

    def untouched(self, start: int, end: int) -> bool:
        return bool((self.memory[start:end] == CANARY).all())


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def fork_peer(way: str, seed: int) -> Served:
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=serve, args=(theirs, mine, way, seed), daemon=True)
    process.start()
    theirs.close()
    return Served(process, mine, seed)


def serve(pipe: Any, other: Any, way: str, seed: int) -> None:
    """A peer's life: what it is asked to do besides is a function of its own memory."""
    die_with_parent()
    other.close()
    pipe.recv()
    memory, plane = pattern(seed).copy(), new_plane(way)
    address = memory.ctypes.data
    plane.register(Memory(address, SIZE), spare=address)
    pipe.send((plane.endpoint, address))
    with suppress(EOFError):
        while True:
            work, *arguments = pipe.recv()
            work(pipe, plane, address, *arguments)


def run(way: str, body: Body, peers: int = 1, later: int = 0, **env: str) -> None:
    """In a process of its own; what it raises is raised here."""
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=read_in_process, args=(theirs, way, body, peers, later, env))
    process.start()
    theirs.close()
    try:
        failure = mine.recv() if mine.poll(120 + 70 * later) else "the reader does not end"
    except EOFError:
        process.join()
        failure = f"the reader died, exit code {process.exitcode}"
    process.kill()
    process.join()
    assert not failure, failure


def read_in_process(
    pipe: Any, way: str, body: Body, peers: int, later: int, env: dict[str, str]
) -> None:
    die_with_parent()
    os.environ.pop("MC_TCP_ENABLE_CONNECTION_POOL", None)
    os.environ.update(ENV | env | ({"UCX_TLS": "tcp"} if way == "nixl-tcp" else {}))
    reader = None
    try:
        reader = Reader(way, peers, later)
        body(reader)
        pipe.send("")
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        for peer in reader.peers if reader else ():
            peer.process.kill()


# ---------------------------------------------------------------- bytes


def read_many(reader: Reader) -> None:
    """Of many sizes, at once, from two peers, at any offset, into places side by side."""
    peers = [reader.connect(0), reader.connect(1)]
    random = np.random.default_rng(0)
    sizes = (1, 2, 7, 64, 4095, 4096, 65_537, MIB, MIB + 13)
    for _ in range(4):
        reader.memory[:] = CANARY
        reads: list[tuple[Read, int, int, int, int]] = []
        local = GUARD
        for number, length in enumerate(random.permutation(sizes * 2).tolist()):
            of, remote = number % 2, int(random.integers(SIZE - length))
            read = reader.start(peers[of], local, remote, length, of)
            reads.append((read, local, remote, length, of))
            local += length + GUARD
        end = 0
        for read, local, remote, length, of in reads:
            assert reader.outcome(read) is Outcome.DONE, read.why
            assert reader.plane.settled(read)
            assert reader.holds(of + 1, local, remote, length)
            assert reader.untouched(end, local)
            end = local + length
        assert reader.untouched(end, SIZE)
    assert not any(peer.reads for peer in peers)


@pytest.mark.parametrize("way", ALL)
def test_bytes_are_right(way: str) -> None:
    run(way, read_many, peers=2)


def read_outside(reader: Reader) -> None:
    peer, end = reader.connect(), reader.peers[0].address + SIZE
    for local, remote, length in (
        (0, SIZE - 5, 10), (0, SIZE, 1), (0, -1, 10), (SIZE - 5, 0, 10), (-5, 0, 10), (0, 0, 0),
    ):  # fmt: skip
        read = reader.start(peer, local, remote, length)
        assert reader.plane.outcome(read) is Outcome.FAILED
        assert reader.plane.settled(read)
    assert peer.connected, "none of them went to the backend"
    larger = msgspec.structs.replace(
        peer.endpoint, memory=Memory(reader.peers[0].address, 2 * SIZE)
    )
    peer.endpoint = larger
    read = reader.plane.start(peer, reader.address + GUARD, end - 5, 10)
    assert reader.outcome(read) is Outcome.FAILED, "the peer did not look"
    assert reader.untouched(1, SIZE)
    reader.connect()
    reader.check_read(peer)


@pytest.mark.parametrize("way", ALL)
def test_an_address_outside_the_memory_fails(way: str) -> None:
    run(way, read_outside)


# ---------------------------------------------------------------- peers that die, stop, restart


def lose_a_peer(reader: Reader) -> None:
    lost, other = reader.connect(0), reader.connect(1)
    reader.peers[0].signal(signal.SIGSTOP)
    running = [reader.start(lost, GUARD + i * MIB, 0, MIB) for i in range(3)]
    reader.peers[0].kill()
    began = time.monotonic()
    outcomes = {reader.outcome(read) for read in running}
    assert outcomes == {Outcome.DONE if reader.way == "nixl" else Outcome.FAILED}
    assert all(reader.plane.settled(read) for read in running)
    assert reader.outcome(reader.start(lost, GUARD, 0, MIB)) is Outcome.FAILED
    assert time.monotonic() - began < 5
    assert not lost.reads
    reader.check_read(other, of=1)
    with pytest.raises(ConnectionError):
        reader.plane.connect(reader.peers[0].endpoint, 1)


@pytest.mark.parametrize("way", ALL)
def test_a_peer_that_dies_fails_its_own_reads(way: str) -> None:
    run(way, lose_a_peer, peers=2)


def stop_a_peer(reader: Reader) -> None:
    stopped, other = reader.connect(0), reader.connect(1)
    reader.peers[0].signal(signal.SIGSTOP)
    reads = [reader.start(stopped, (2 + i) * MIB, i * MIB, MIB) for i in range(3)]
    for _ in range(20):
        reader.check_read(other, of=1)
    for read in reads:
        assert reader.plane.outcome(read) is None
        reader.plane.give_up(read)
        assert reader.plane.outcome(read) is Outcome.FAILED
        assert not reader.plane.settled(read)
    stopped.connected = False  # as if another read had failed
    with pytest.raises(ConnectionError, match="have not ended"):
        reader.plane.connect(reader.peers[0].endpoint, 1)
    assert not any(reader.plane.settled(read) for read in reads)
    assert reader.untouched(2 * MIB, 5 * MIB)
    reader.peers[0].signal(signal.SIGCONT)
    watch_until_settled(reader, reads)
    assert reader.connect(0) is stopped
    reader.check_read(stopped)


def watch_until_settled(reader: Reader, reads: list[Read]) -> None:
    """The bytes of reads that were given up do land, and none once a read is settled."""
    until, found = time.monotonic() + PATIENCE_S, {}
    while len(found) < len(reads) and time.monotonic() < until:
        for number, read in enumerate(reads):
            if number not in found and reader.plane.settled(read):
                found[number] = reader.memory[(2 + number) * MIB : (3 + number) * MIB].copy()
        time.sleep(2e-4)
    assert len(found) == len(reads)
    time.sleep(0.5)
    for number, then in found.items():
        assert (then == reader.memory[(2 + number) * MIB : (3 + number) * MIB]).all()
        assert (then != CANARY).any(), "nothing has landed late: this test shows nothing"
        assert reader.plane.outcome(reads[number]) is Outcome.FAILED


@pytest.mark.parametrize("way", WAITING)
def test_reads_of_a_stopped_peer_are_settled_when_they_end(way: str) -> None:
    run(way, stop_a_peer, peers=2)


def forget_a_stopped_peer(reader: Reader) -> None:
    peer = reader.connect()
    reader.peers[0].signal(signal.SIGSTOP)
    reads = [reader.start(peer, (2 + i) * MIB, i * MIB, MIB) for i in range(3)]
    for read in reads:
        reader.plane.give_up(read)
    reader.plane.forget(peer)
    assert not any(reader.plane.settled(read) for read in reads)
    late = reader.start(peer, GUARD, 0, 10)
    assert reader.plane.outcome(late) is Outcome.FAILED
    with pytest.raises(ConnectionError, match="have not ended"):
        reader.plane.connect(reader.peers[0].endpoint, 1)
    reader.peers[0].signal(signal.SIGCONT)
    watch_until_settled(reader, reads)
    again = reader.connect()
    assert again is not peer
    reader.check_read(again)


@pytest.mark.parametrize("way", WAITING)
def test_a_peer_is_forgotten_when_its_reads_have_ended(way: str) -> None:
    run(way, forget_a_stopped_peer)


def share_a_peer(reader: Reader) -> None:
    """Two prefill servers may publish one rank, in part too: neither ends what the other has."""
    first, second = reader.connect(), reader.connect()
    assert first is second
    reader.plane.forget(first)
    reader.check_read(second)
    same = msgspec.structs.replace(second.endpoint, instance=b"another one")
    third = reader.plane.connect(msgspec.msgpack.encode(same), PATIENCE_S)
    reader.check_read(third)
    reader.plane.forget(third)
    reader.check_read(second)
    reader.plane.forget(second)
    assert reader.outcome(reader.start(second, GUARD, 0, 10)) is Outcome.FAILED
    assert not reader.plane._peers
    reader.check_read(reader.connect())


@pytest.mark.parametrize("way", ALL)
def test_a_peer_is_there_as_long_as_it_has_a_user(way: str) -> None:
    run(way, share_a_peer)


def serve_reads(_pipe: Any, plane: DataPlane, address: int, endpoint: bytes, remote: int) -> None:
    """Reads of another peer, begun and not waited for."""
    peer = plane.connect(endpoint, PATIENCE_S)
    _pipe.send("connected")
    _pipe.recv()
    for i in range(6):
        plane.start(peer, address + i * MIB, remote + i * MIB, MIB)
    _pipe.send("begun")


def lose_a_reader(reader: Reader) -> None:
    """Of a peer that is stopped, so that it meets the reads when their reader is gone."""
    server, victim = reader.peers
    peer = reader.connect()
    victim.pipe.send((serve_reads, server.endpoint, server.address))
    assert victim.pipe.recv() == "connected"
    server.signal(signal.SIGSTOP)
    victim.pipe.send("go")
    assert victim.pipe.recv() == "begun"
    victim.kill()
    time.sleep(0.2)
    server.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert server.process.is_alive()
    reader.check_read(peer)


ABORTS = pytest.mark.xfail(strict=True, reason="UCX aborts a peer that meets a dead reader's read")


@pytest.mark.parametrize("way", ["mooncake", "nixl", pytest.param("nixl-tcp", marks=ABORTS)])
def test_a_reader_that_dies_leaves_its_peer_alone(way: str) -> None:
    run(way, lose_a_reader, peers=2)


def restart_a_peer(reader: Reader) -> None:
    old, new = reader.connect(0), reader.connect(1)
    reader.check_read(old)
    reader.peers[0].kill()
    reader.plane.forget(old)
    assert reader.plane.outcome(reader.start(old, GUARD, 0, 10)) is Outcome.FAILED
    reader.check_read(new, of=1)
    with pytest.raises(ConnectionError):
        reader.plane.connect(reader.peers[0].endpoint, 1)
    assert reader.connect(1) is new


@pytest.mark.parametrize("way", ALL)
def test_a_peer_that_was_restarted(way: str) -> None:
    run(way, restart_a_peer, peers=2)


def meet_another_instance(reader: Reader) -> None:
    """What Mooncake knows of a name it never asks for again."""
    first = reader.connect()
    other = msgspec.structs.replace(first.endpoint, instance=b"another one")
    second = reader.plane.connect(msgspec.msgpack.encode(other))
    assert first.link != second.link
    for peer in (first, second):
        reader.check_read(peer)


def test_mooncake_names_each_instance_at_an_address() -> None:
    run("mooncake", meet_another_instance)


def restart_at_the_same_ports(reader: Reader) -> None:
    """Four ports for two processes, so that a peer's two are those of the last one, in the same
    order or the other: either can be known for something else."""
    peer, sessions = reader.connect(), set()
    for number in range(1, 4):
        sessions.add(peer.endpoint.target)
        reader.check_read(peer, of=number - 1)
        reader.peers[number - 1].kill()
        reader.plane.forget(peer)
        time.sleep(62)  # until the kernel gives the ports away again
        reader.peers[number].begin()
        peer = reader.connect(number)
        for _ in range(8):
            reader.check_read(peer, of=number)
    assert len(sessions) < 3, "none of them was at an address of another"


@pytest.mark.full
def test_mooncake_at_the_same_ports() -> None:
    ports = {"MC_MIN_RPC_PORT": "17101", "MC_MAX_RPC_PORT": "17104"}
    run("mooncake", restart_at_the_same_ports, later=3, **ports)


def cut_connections(reader: Reader) -> None:
    """Mooncake has four to a peer, and meets those that broke one by one."""
    peer = reader.connect()
    for _ in range(2):
        reads = [reader.start(peer, GUARD + i * MIB, 0, MIB) for i in range(6)]
        assert {reader.outcome(read) for read in reads} == {Outcome.DONE}
        assert shut_sockets() > 0
        time.sleep(0.2)
        assert reader.outcome(reader.start(peer, GUARD, 0, 10)) is Outcome.FAILED
        assert reader.connect() is peer
        reads = [reader.start(peer, GUARD + i * MIB, 0, MIB) for i in range(6)]
        assert {reader.outcome(read) for read in reads} == {Outcome.DONE}
        reader.check_read(peer)


def shut_sockets() -> int:
    """This process's TCP connections."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as mine:
            if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername():
                mine.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


@pytest.mark.parametrize("way", WAITING)
def test_connect_mends_a_broken_connection(way: str) -> None:
    run(way, cut_connections)


# ---------------------------------------------------------------- threads


def connect_to_a_stopped_peer(reader: Reader) -> None:
    other = reader.connect(1)
    reader.peers[0].signal(signal.SIGSTOP)
    raised: list[BaseException | None] = []

    def connect() -> None:
        try:
            reader.plane.connect(reader.peers[0].endpoint, 1)
            raised.append(None)
        except ConnectionError as error:
            raised.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    until = time.monotonic() + 2
    while time.monotonic() < until:
        reader.check_read(other, of=1)
    reader.peers[0].signal(signal.SIGCONT)
    thread.join(PATIENCE_S)
    assert len(raised) == 1
    assert reader.way == "mooncake" or isinstance(raised[0], ConnectionError)
    until = time.monotonic() + PATIENCE_S
    while raised[0] and reader.peers[0].endpoint in reader.plane._peers:
        assert time.monotonic() < until
        assert reader.connect(1) is other  # looks after what the other one left running
    reader.connect(0)
    reader.check_read(reader.connect())


@pytest.mark.parametrize("way", WAITING)
def test_connecting_to_a_stopped_peer_holds_up_nobody(way: str) -> None:
    run(way, connect_to_a_stopped_peer, peers=2)


def start_while_connecting(reader: Reader) -> None:
    peer = reader.connect()
    with peer.connecting:
        read = reader.start(peer, GUARD, 0, 10)
    assert reader.plane.outcome(read) is Outcome.FAILED
    reader.check_read(peer)


def test_start_does_not_wait_for_connect() -> None:
    run("mooncake", start_while_connecting)


def close_twice(reader: Reader) -> None:
    """A process's first engine may leave threads that all share."""
    reader.check_read(reader.connect())
    reader.plane.close()
    counts = []
    for _ in range(2):
        before = threads()
        reader.plane = new_plane(reader.way)
        reader.plane.register(Memory(reader.address, SIZE), spare=reader.address)
        assert threads() > before
        reader.check_read(reader.connect())
        reader.plane.close()
        until = time.monotonic() + PATIENCE_S
        while threads() > before and time.monotonic() < until:
            time.sleep(0.01)
        counts.append((threads(), before))
    assert all(after <= before for after, before in counts), counts


@pytest.mark.parametrize("way", ALL)
def test_close_leaves_no_thread(way: str) -> None:
    run(way, close_twice)


def close_while_reads_run(reader: Reader) -> None:
    peer = reader.connect()
    reader.peers[0].signal(signal.SIGSTOP)
    reads = [reader.start(peer, (2 + i) * MIB, i * MIB, MIB) for i in range(3)]
    began = time.monotonic()
    reader.plane.close()
    assert time.monotonic() - began < 10
    assert all(reader.plane.settled(read) for read in reads)
    assert {reader.plane.outcome(read) for read in reads} == {Outcome.FAILED}
    assert reader.plane.outcome(reader.start(peer, GUARD, 0, 10)) is Outcome.FAILED
    reader.peers[0].signal(signal.SIGCONT)
    time.sleep(1)
    assert reader.untouched(2 * MIB, 5 * MIB)


@pytest.mark.parametrize("way", WAITING)
def test_nothing_lands_after_close(way: str) -> None:
    run(way, close_while_reads_run)


def close_with_reads_in_flight(reader: Reader) -> None:
    peer = reader.connect()
    reads = [reader.start(peer, GUARD + i * MIB, i * MIB, MIB) for i in range(6)]
    reader.plane.close()
    assert {reader.plane.outcome(read) for read in reads} == {Outcome.DONE}
    assert all(reader.holds(1, GUARD + i * MIB, i * MIB, MIB) for i in range(6))


@pytest.mark.parametrize("way", ALL)
def test_close_lets_reads_end(way: str) -> None:
    run(way, close_with_reads_in_flight)


def idle(reader: Reader) -> None:
    reader.check_read(reader.connect())
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("way", ALL)
def test_an_idle_plane_takes_no_core(way: str) -> None:
    run(way, idle)


def count_connections(reader: Reader) -> None:
    """To a peer's ports, those that were closed of late included."""
    peer = reader.connect()
    for _ in range(40):
        reader.check_read(peer, length=64)
    assert len(connections_to(listening_ports(reader.peers[0].process.pid))) < 20


def tcp_table() -> list[list[str]]:
    """Of the kernel: number, local address, remote address, state, ..., inode."""
    tables = [Path("/proc/net", name).read_text().splitlines() for name in ("tcp", "tcp6")]
    return [line.split() for table in tables for line in table[1:]]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def listening_ports(pid: int) -> set[int]:
    held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    return {
        port_of(row[1]) for row in tcp_table() if row[3] == "0A" and f"socket:[{row[9]}]" in held
    }


def connections_to(ports: set[int]) -> list[list[str]]:
    return [row for row in tcp_table() if port_of(row[2]) in ports]


def test_mooncake_connects_once_and_not_for_each_read() -> None:
    run("mooncake", count_connections)


# ---------------------------------------------------------------- beside SGLang's


@contextmanager
def stock_writes(way: str, other: Any) -> Iterator[Callable[[], None]]:
    """SGLang's own engine or agent of this process, and one write of it to a peer's, checked."""
    source = np.full(MIB, 7, np.uint8)
    if way == "mooncake":
        engine = stock_mooncake(source)
        yield lambda: check_code(engine.transfer_sync(other[0], source.ctypes.data, other[1], MIB))
        return
    agent = stock_agent(source)
    name = agent.add_remote_agent(other[0])

    def write() -> None:
        here = agent.get_xfer_descs([(source.ctypes.data, MIB, 0)], "DRAM")
        there = agent.get_xfer_descs([(other[1], MIB, 0)], "DRAM")
        handle = agent.initialize_xfer("WRITE", here, there, name)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(1e-4)
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        agent.release_xfer_handle(handle)

    yield write


def check_code(code: int) -> None:
    assert code == 0


def stock_mooncake(memory: np.ndarray) -> Any:
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        init_mooncake_transfer_engine,
    )

    engine = init_mooncake_transfer_engine("127.0.0.1", 0, None)
    engine.register(memory.ctypes.data, memory.nbytes)
    return engine


def stock_agent(memory: np.ndarray) -> Any:
    """As NixlKVManager.__init__ makes it on a prefill rank."""
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixlBind

    assert nixlBind.nixlAgentConfig.__module__ == nixlBind.__name__, "not the plane's"
    config = nixl_agent_config(
        backends=[], num_threads=8, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    agent = nixl_agent(f"stock {os.getpid()}", config)
    agent.create_backend("UCX", {"num_threads": "8"})
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def serve_beside(pipe: Any, _plane: DataPlane, _address: int, way: str) -> None:
    memory = np.zeros(MIB, np.uint8)
    stock = stock_mooncake(memory) if way == "mooncake" else stock_agent(memory)
    name = stock.get_session_id() if way == "mooncake" else stock.get_agent_metadata()
    pipe.send((name, memory.ctypes.data))
    pipe.recv()
    pipe.send(bool((memory == 7).all()))


def work_beside(reader: Reader) -> None:
    pipe, failed = reader.peers[0].pipe, []
    pipe.send((serve_beside, reader.way))
    stop = threading.Event()
    with stock_writes(reader.way, pipe.recv()) as write:
        peer = reader.connect()

        def keep_writing() -> None:
            try:
                while not stop.is_set():
                    write()
            except BaseException:
                failed.append(traceback.format_exc())

        thread = threading.Thread(target=keep_writing)
        thread.start()
        for _ in range(20):
            reader.check_read(peer)
        stop.set()
        thread.join()
        reader.plane.close()
        write()
    assert not failed
    pipe.send("written")
    assert pipe.recv()


@pytest.mark.parametrize("way", ALL)
def test_beside_sglangs_own_engine(way: str) -> None:
    run(way, work_beside)


# ---------------------------------------------------------------- refused


def refuse_memory(reader: Reader) -> None:
    with pytest.raises(MixKVError, match="MIXKV-START-06"):
        reader.plane.register(Memory(reader.address, SIZE), spare=reader.address)


def test_memory_that_mooncake_does_not_take() -> None:
    run("mooncake", refuse_memory)


def refuse_backend(reader: Reader) -> None:
    from sglang_mixkv.channel.nixl import Nixl

    with pytest.raises(MixKVError, match="MIXKV-START-06"):
        Nixl("no such backend")
    with pytest.raises(MixKVError, match="MIXKV-START-06"):
        new_plane("nixl").register(Memory(reader.address, SIZE, device=0))


def test_a_backend_that_nixl_does_not_have() -> None:
    run("nixl", refuse_backend)


def refuse_endpoints(reader: Reader) -> None:
    found = msgspec.msgpack.decode(reader.peers[0].endpoint, type=Endpoint)
    for wrong in (
        b"",
        b"nonsense",
        msgspec.msgpack.encode(msgspec.structs.replace(found, plane="x")),
    ):
        with pytest.raises(ValueError, match=r"xpected|truncated"):
            reader.plane.connect(wrong)
    gone = msgspec.structs.replace(found, session=b"127.0.0.1:1")
    with pytest.raises(ConnectionError):
        reader.plane.connect(msgspec.msgpack.encode(gone), 1)
    assert not reader.plane._peers
    reader.check_read(reader.connect())


@pytest.mark.parametrize("way", ALL)
def test_bytes_that_are_no_endpoint(way: str) -> None:
    run(way, refuse_endpoints)


# ---------------------------------------------------------------- without a backend


class Slow(DataPlane):
    """Its reads end when `end` is set. `_check` takes a while, and notices a second caller."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__()
        self.end, self.checking, self.wrong = False, 0, 0

    def _register(self, memory: Memory) -> bytes:
        return b""

    def _open(self, peer: Peer) -> None:
        peer.link = "somebody"

    def _post(self, read: Read, local: int, remote: int, length: int) -> None:
        read.handle = object()

    def _check(self, read: Read) -> Outcome | None:
        self.checking += 1
        self.wrong += self.checking > 1 or read.handle is None
        time.sleep(1e-3)
        self.checking -= 1
        return Outcome.DONE if self.end else None

    def _release(self, read: Read) -> None:
        read.handle = None

    def _drop(self, peer: Peer) -> None:
        raise RuntimeError("forget must not raise")

    def _close(self) -> None:
        pass


def test_a_read_is_looked_at_by_one_thread_at_a_time() -> None:
    """`connect` asks for the ends of reads that the channel's thread asks for as well. Mooncake
    frees what has ended."""
    plane = Slow()
    plane.register(Memory(0, 100), spare=0)
    peer = Peer(b"", Endpoint("slow", b"", Memory(0, 100), b""))
    read = plane.start(peer, 0, 0, 10)
    both = [
        threading.Thread(target=lambda: [plane.settled(read) for _ in range(50)]) for _ in range(2)
    ]
    for thread in both:
        thread.start()
    time.sleep(0.02)
    plane.end = True
    for thread in both:
        thread.join()
    assert plane.settled(read)
    assert plane.wrong == 0


def test_forget_does_not_raise() -> None:
    plane = Slow()
    plane.register(Memory(0, 100), spare=0)
    peer = plane._peers[b"x"] = Peer(b"x", Endpoint("slow", b"", Memory(0, 100), b""))
    plane.forget(peer)
    assert not plane._peers


@pytest.mark.parametrize("number", [0, (1 << 64) - 1])
def test_a_read_that_mooncake_rejects(number: int) -> None:
    """-1 as Mooncake's binding returns it, in its releases with and without a sign."""
    from sglang_mixkv.channel.mooncake import Mooncake

    plane = object.__new__(Mooncake)
    DataPlane.__init__(plane)
    plane._memory = Memory(0, 100)
    plane._engine = SimpleNamespace(batch_transfer_async_read=lambda *_: number)
    peer = Peer(b"", Endpoint("mooncake", b"", Memory(0, 100), b""))
    read = plane.start(peer, 0, 0, 10)
    assert (plane.outcome(read), plane.settled(read)) == (Outcome.FAILED, True)
    assert "rejected" in read.why
