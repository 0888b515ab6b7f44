"""Long lists of reads that something happens to when they are under way."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from rig.channel.planes import CANARY, GUARD, LIST, MIB, ONE, SIZE, Reader, pattern

from sglang_mixkv.channel.data_plane import RemoteMemory

LONG = LIST * 6  # the same bytes again, to the same places
OTHER = 0x5A  # of whoever gets the slots next


def begin_list(reader: Reader, peer: RemoteMemory, of: int = 0) -> int:
    """Begin a list, and wait until some of it has landed, but not all."""
    places = np.array([to + at for to, _, n in LIST for at in (0, n // 2, n - 8)])
    for _ in range(20):
        reader.memory[:] = CANARY
        tag = reader.start(peer, *LONG, of=of)
        while all((reader.memory[places + at] == CANARY).all() for at in range(8)):
            time.sleep(1e-4)
        if reader.wait(tag, seconds=0) == [None]:
            return tag
    raise AssertionError("no list was met midway")


def check_nobody_writes(reader: Reader, seconds: float = 3) -> None:
    """Whoever has the slots after reads that have ended has them alone."""
    reader.memory[:] = OTHER
    time.sleep(seconds)
    assert (reader.memory[:SIZE] == OTHER).all(), "a read had not ended"


def check_a_peers_end(reader: Reader, end: Callable[[], None]) -> None:
    """End a peer in the middle of a list: its reads fail, and nothing lands any more. The second
    peer is read meanwhile and later."""
    lost, other = reader.connect(0), reader.connect(1)
    tag = begin_list(reader, lost)
    end()
    began = time.monotonic()
    assert all(reader.wait(tag)), "they have not failed"
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
    """Read a list whose middle reads ten bytes of the peer's memory at `there`. The peer has
    registered the first `inside` of them; no others land."""
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
    """Claim more memory for the peer than it has, so that its reads are not refused on this
    side."""
    import msgspec

    there = peer.endpoint.memory
    more = msgspec.structs.replace(there, size=1 << 40)
    peer.endpoint = msgspec.structs.replace(peer.endpoint, memory=more)
