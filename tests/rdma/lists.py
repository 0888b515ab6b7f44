"""Checks with long lists of reads, during which a fault occurs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from rig.channel.planes import CANARY, GUARD, LIST, MIB, ONE, SIZE, Reader, pattern

from sglang_mixkv.channel.data_plane import RemoteMemory

LONG = LIST * 6  # repeats the same reads
OTHER = 0x5A  # written by the next user of the slots


def begin_list(reader: Reader, peer: RemoteMemory, of: int = 0) -> int:
    """Start a list of reads, and return while only a part of its bytes has arrived."""
    places = np.array([to + at for to, _, n in LIST for at in (0, n // 2, n - 8)])
    for _ in range(20):
        reader.memory[:] = CANARY
        tag = reader.start(peer, *LONG, of=of)
        while all((reader.memory[places + at] == CANARY).all() for at in range(8)):
            time.sleep(1e-4)
        if reader.wait(tag, seconds=0) == [None]:
            return tag
    raise AssertionError("every list completed too early")


def check_nobody_writes(reader: Reader, seconds: float = 3) -> None:
    """Check that no read writes to the slots after it has ended."""
    reader.memory[:] = OTHER
    time.sleep(seconds)
    assert (reader.memory[:SIZE] == OTHER).all(), "a read wrote after it had ended"


def check_a_peers_end(reader: Reader, end: Callable[[], None]) -> None:
    """Check that after the end of a peer in the middle of a list, its reads fail and no more bytes
    arrive, and that reads of another peer succeed."""
    lost, other = reader.connect(0), reader.connect(1)
    tag = begin_list(reader, lost)
    end()
    began = time.monotonic()
    assert all(reader.wait(tag)), "the reads have not failed"
    print(f"{reader.way}: ended after {time.monotonic() - began:.1f} s: {reader.ends[tag]}")
    check_nobody_writes(reader)
    reader.check_read(other, of=1)
    assert all(reader.wait(reader.start(lost, ONE)))
    assert not lost.reads
    reader.plane.forget(lost)
    with pytest.raises(ConnectionError):
        reader.connect(0, 1)
    reader.check_read(other, of=1)
    reader.check_read(reader.connect(1), of=1)


def check_a_wrong_part(reader: Reader, there: int, inside: int = 0) -> None:
    """Check a list that contains a read of ten bytes at `there`, of which the peer has registered
    only the first `inside`. The list fails, and no unregistered byte arrives."""
    to = GUARD + 30 * MIB
    peer = reader.connect()
    claim(peer)
    reader.memory[:] = CANARY
    tag = reader.start(peer, *LIST[:12], (to, there, 10), *LIST[12:])
    assert all(reader.wait(tag))
    known, rest = np.split(reader.memory[to:], [inside])
    assert (rest == CANARY).all()
    assert ((known == CANARY) | (known == pattern(1)[there:][:inside])).all()
    check_nobody_writes(reader)
    reader.plane.forget(peer)
    reader.check_read(reader.connect())


def claim(peer: RemoteMemory) -> None:
    """Make the reader assume more memory than the peer has, so that it does not reject the read
    itself."""
    import msgspec

    there = peer.endpoint.memory
    more = msgspec.structs.replace(there, size=1 << 40)
    peer.endpoint = msgspec.structs.replace(peer.endpoint, memory=more)
