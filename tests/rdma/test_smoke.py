"""Over verbs: bytes, endpoints, and a peer that is killed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from rig.planes import GUARD, LIST, MIB, ONE, Reader, check_bytes, check_endpoints, over
from rig.verbs import devices

from sglang_mixkv.tools.doctor_read import devices_in_use

BOTH = "mooncake-rdma", "nixl-rc"
OTHER = 0x5A  # of whoever gets the slots next


@over(*BOTH, peers=2)
def test_bytes_are_right(reader: Reader) -> None:
    """And the device has carried them."""
    device = devices()[0]
    before = device.sent
    check_bytes(reader)
    assert devices_in_use() == [device.name]
    assert device.sent - before > 4 * 9 * MIB // 4096


@over(*BOTH)
def test_endpoints(reader: Reader) -> None:
    check_endpoints(reader)


def begin_list(reader: Reader, peer: object) -> int:
    """Some of it has landed, and not all."""
    tag = reader.start(peer, *LIST)
    ends = np.array([to + n - 1 for to, _, n in LIST])
    before = reader.memory[ends].copy()
    while (reader.memory[ends] == before).all():
        time.sleep(1e-3)
    return tag


def check_nobody_writes(reader: Reader, seconds: float = 2) -> None:
    """Whoever has the slots after reads that ended has them alone."""
    reader.memory[GUARD : GUARD + 24 * MIB] = OTHER
    time.sleep(seconds)
    assert (reader.memory[GUARD : GUARD + 24 * MIB] == OTHER).all()


@over(*BOTH, "mooncake-wire", "nixl-wire", peers=2)
def test_a_peer_that_is_killed_fails_its_own_reads(reader: Reader) -> None:
    lost, other = reader.connect(0), reader.connect(1)
    tags = [begin_list(reader, lost), reader.start(lost, (30 * MIB, 0, MIB))]
    began = time.monotonic()
    reader.peers[0].kill()
    ends = reader.wait(*tags)
    print("ended after", time.monotonic() - began, ends, "landed", sum(reader.landed(tags[0])))
    assert all(ends)
    check_nobody_writes(reader)
    reader.check_read(other, of=1)
    assert all(reader.wait(reader.start(lost, ONE)))
    assert not lost.reads
    reader.plane.forget(lost)
    with pytest.raises(ConnectionError):
        reader.connect(0, 1)
    reader.check_read(other, of=1)
