"""Smoke tests over verbs: correct bytes, endpoints, and a peer that is killed."""

from __future__ import annotations

from rdma.lists import check_a_peers_end
from rdma.verbs import devices
from rig.channel.planes import MIB, Reader, check_bytes, check_endpoints, over

from sglang_mixkv.tools.doctor_read import devices_in_use

BOTH = "mooncake-rdma", "nixl-rc"


@over(*BOTH, peers=2)
def test_bytes_are_right(reader: Reader) -> None:
    """The bytes are correct, and went over the device, not over TCP."""
    device = devices()[0]
    before = device.sent
    check_bytes(reader)
    assert devices_in_use() == [device.name]
    assert device.sent - before > 4 * 8 * MIB // 4096


@over(*BOTH)
def test_endpoints(reader: Reader) -> None:
    check_endpoints(reader)


@over("mooncake-rdma", "nixl-wire", peers=2)
def test_a_peer_that_is_killed_fails_its_own_reads(reader: Reader) -> None:
    """NIXL uses the slow wire, since reads on a single device would end before the kill."""
    check_a_peers_end(reader, reader.peers[0].kill)
