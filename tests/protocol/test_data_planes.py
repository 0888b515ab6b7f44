"""Test the draft channel's data planes between processes: Mooncake over TCP, NIXL with UCX's own
choice of transport, and NIXL with UCX restricted to TCP.

By default, UCX reads the memory of a process on the same host without that process's help, so a
read never waits for a stopped peer. Tests in which a read must wait use the other two.
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rig.channel.planes import (
    CANARY,
    GUARD,
    LIST,
    MIB,
    ONE,
    PATIENCE_S,
    QUIET_S,
    SIZE,
    Reader,
    check_bytes,
    check_endpoints,
    over,
)

from sglang_mixkv.channel.data_plane import DataPlane, Memory, decode

LISTEN = "0A"  # the state LISTEN in /proc/net/tcp
ALL, WAITING = ("mooncake", "nixl", "nixl-tcp"), ("mooncake", "nixl-tcp")


# ---------------------------------------------------------------- bytes


@over(*ALL, "mooncake-6", peers=2)
def test_bytes_are_right(reader: Reader) -> None:
    check_bytes(reader)


@over(*ALL)
def test_a_list_with_a_bad_part_fails_once_all_parts_ended(reader: Reader) -> None:
    """One part exceeds the peer's memory, so the peer rejects it. The list fails only after all its
    other parts have ended."""
    peer = reader.connect()
    peer.endpoint = msgspec.structs.replace(
        peer.endpoint, memory=Memory(reader.peers[0].address, 2 * SIZE)
    )
    wrong = (GUARD + 30 * MIB, SIZE - 5, 10)
    reader.peers[0].stop()
    tags = [reader.start(peer, *LIST[:at], wrong, *LIST[at:]) for at in (0, 12, 24)]
    reader.look()
    assert not any(error == "" for error in reader.ends.values())
    assert reader.way != "mooncake" or not reader.ends, "the peer is stopped and cannot answer"
    reader.peers[0].go_on()
    assert all(reader.wait(*tags))
    reader.check_nothing_lands(*tags)
    assert (reader.memory[GUARD + 30 * MIB :] == CANARY).all()
    assert reader.way != "mooncake" or any(reader.landed(tags[0])), "no part of the list was read"
    reader.plane.forget(peer)
    reader.check_read(reader.connect())


# ---------------------------------------------------------------- peers that die, stop, restart


@over(*ALL, peers=2)
def test_a_dead_peer_fails_only_its_own_reads(reader: Reader) -> None:
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
def test_reads_of_a_stopped_peer_end_with_their_last_byte(reader: Reader) -> None:
    """Reads of a stopped peer stay in flight until it continues, even if the reader forgets the
    peer meanwhile. Reads of another peer continue."""
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
def test_connecting_to_a_stopped_peer_delays_no_other_read(reader: Reader) -> None:
    """Reads of another peer continue during the attempt to connect. After the attempt has timed
    out, the reader can connect once the peer answers again."""
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
def test_connecting_to_a_host_that_is_off_delays_no_other_read(reader: Reader) -> None:
    """A port whose backlog is full does not answer, as if its host were off: the kernel repeats the
    SYN for two minutes. The test connects to the first peer's endpoint with this port in it."""
    other, known = reader.connect(1), decode(reader.peers[0].endpoint, "nixl")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as filling:
        session, port = known.session, full.getsockname()[1]
        for _ in range(4):
            client = filling.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        for its in listening_ports(reader.peers[0].process.pid):
            session = session.replace(its.to_bytes(2, "big"), port.to_bytes(2, "big"))
        assert session != known.session, "no port of the endpoint was replaced"
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
    """Start reads of another peer and do not wait for them."""
    peer = plane.connect(endpoint, PATIENCE_S)
    pipe.send("connected")
    pipe.recv()
    for i in range(6):
        places = range(i * 4 * MIB, (i + 1) * 4 * MIB, MIB)
        plane.start(i, peer, [(address + at, remote + at, MIB) for at in places])
    pipe.send("begun")


@over("mooncake", "nixl", peers=2)
def test_a_reader_that_dies_leaves_its_peer_alone(reader: Reader) -> None:
    """The peer is stopped, so that it handles the reads only after the reader has died."""
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
def test_a_broken_connection_is_replaced(reader: Reader) -> None:
    """Mooncake reuses its four connections to a peer, and detects broken ones one by one. NIXL has
    one connection per rank, which `peer` and `idle` share."""
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


@over(*ALL, "mooncake-6")
def test_endpoints(reader: Reader) -> None:
    check_endpoints(reader)


def shut_sockets() -> int:
    """Shut this process's TCP connections."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as mine:
            if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername():
                mine.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
