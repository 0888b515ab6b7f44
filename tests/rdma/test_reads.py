"""Reads over verbs are correct on each path, and end safely if they fail."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

from rdma import lists
from rdma.verbs import devices, lose, set_link, set_rate
from rig.channel.planes import CANARY, GUARD, LIST, MIB, PATIENCE_S, SIZE, Reader, check_bytes, over

from sglang_mixkv.channel import mooncake
from sglang_mixkv.channel.data_plane import DataPlane
from sglang_mixkv.tools.doctor_read import devices_in_use
from tests.protocol import test_data_planes as data_planes

BOTH = "mooncake-rdma", "nixl-rc"
WIRE = "mooncake-wire", "nixl-wire"


@over("mooncake-4", "nixl-4", "mooncake-6", "nixl-6", *WIRE, "mooncake-two", "nixl-two", peers=2)
def test_bytes_are_right(reader: Reader) -> None:
    """The ways include IPv4 and IPv6 GIDs, a wire, and two devices on both sides, all of which are
    used. The wire's rate is raised, since Mooncake's queued reads time out at 64 Mbit/s."""
    used = devices()[: 2 if reader.way.endswith("two") else 1]
    before = [device.sent for device in used]
    if reader.way.endswith("-wire"):
        set_rate("400mbit")
    try:
        check_bytes(reader)
    finally:
        if reader.way.endswith("-wire"):
            set_rate("64mbit")
    assert devices_in_use() == [device.name for device in used]
    assert all(device.sent > sent for device, sent in zip(used, before, strict=True))


@over(*BOTH)
def test_unregistered_memory_is_not_read(reader: Reader) -> None:
    """Unregistered memory is not read, and a list with such a part fails once all its parts have
    ended."""
    lists.check_a_wrong_part(reader, SIZE + 64 * MIB)


@over(*BOTH)
def test_a_read_past_the_end_of_registered_memory_fails(reader: Reader) -> None:
    """Mooncake splits a read at the end of registered memory (SliceLengthCalculator in
    rdma_transport.cpp), so the first bytes arrive although the read fails."""
    lists.check_a_wrong_part(reader, SIZE - 5, inside=5)


@over("mooncake-rdma")
def test_a_read_that_only_the_device_rejects_fails(reader: Reader) -> None:
    """The test makes the peer's registered memory look larger, so that Mooncake posts the read and
    the device rejects it. (NIXL's metadata cannot be changed.)"""
    ask = mooncake._ask

    def exaggerated(session: str) -> bytes:
        answer = json.loads(ask(session)[9:])
        for buffer in answer["buffers"]:
            buffer["length"] *= 2
        return mooncake._frame(answer)

    mooncake._ask = exaggerated
    lists.check_a_wrong_part(reader, SIZE - 5)


def end_engine(pipe: Any, plane: DataPlane, _: int) -> None:
    """End a process's engine but not the process. This destroys the queue pairs and unregisters the
    memory."""
    plane.__dict__.update(_engine=None, _agent=None)
    pipe.send("ended")


@over(*WIRE, peers=2)
def test_reads_fail_after_the_peers_engine_has_ended(reader: Reader) -> None:
    def end() -> None:
        reader.peers[0].pipe.send((end_engine,))

    lists.check_a_peers_end(reader, end)


@over(*WIRE, peers=2)
def test_reads_fail_after_a_peer_behind_a_wire_was_killed(reader: Reader) -> None:
    lists.check_a_peers_end(reader, reader.peers[0].kill)


def check_an_interruption(reader: Reader, cut: Any, mend: Any) -> None:
    """Check that reads end, correct or failed, after the link was down for 2 s, and that they fail
    without late bytes if it stays down. The peer can be read again afterwards."""
    try:
        for down_s in (2.0, PATIENCE_S):
            peer = reader.connect()
            tag = lists.begin_list(reader, peer)
            cut()
            began = time.monotonic()
            ends = reader.wait(tag, seconds=down_s)
            if down_s > 2:
                assert all(ends), "the read has not failed"
                lists.check_nobody_writes(reader)
            mend()
            assert reader.wait(tag) != [None], "the read has not ended"
            print(
                f"{reader.way}: {ends} after {time.monotonic() - began:.1f} s, {reader.ends[tag]}"
            )
            reader.plane.forget(peer)
            lists.check_nobody_writes(reader)
            reader.check_read(reader.connect())
    finally:
        mend()


@over(*WIRE)
def test_reads_end_if_the_wire_is_cut(reader: Reader) -> None:
    check_an_interruption(reader, lambda: lose(100), lambda: lose(0))


@over("mooncake-wire")
def test_reads_end_if_the_device_goes_down(reader: Reader) -> None:
    check_an_interruption(reader, lambda: set_link("down"), lambda: set_link("up"))


@over(*BOTH)
def test_a_stopped_peer_can_be_read(reader: Reader) -> None:
    """The peer's device serves reads without the peer's process, unlike TCP."""
    peer = reader.connect()
    reader.peers[0].stop()
    assert reader.wait(reader.start(peer, *LIST)) == [""]
    reader.peers[0].go_on()


def wait_for_port(port: int) -> None:
    """Wait until the port is free. The kernel reserves it for a minute after a connection
    (TIME_WAIT)."""
    for _ in range(100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return
        time.sleep(1)


@over("mooncake-rdma", peers=0, later=2)
def test_a_peer_restarted_at_its_address_can_be_read(reader: Reader) -> None:
    """Reads of the new instance are correct. A read by the old instance's name fails, or returns
    the new instance's bytes, since Mooncake queries the address again after a failure
    (getSegmentDescByID in transfer_metadata.cpp). Only a slot's stamp shows that these bytes are
    not the expected ones. With NIXL, every agent has its own name."""
    one, two = reader.peers
    port = {"MC_MIN_RPC_PORT": "20117", "MC_MAX_RPC_PORT": "20118"}
    with socket.create_server(("", 20117)):  # Mooncake tries the two ports until one is free
        one.begin(**port)
        old = reader.connect(0)
        reader.check_read(old, of=0)
        one.kill()
        wait_for_port(20118)
        two.begin(**port)
    new = reader.connect(1)
    assert new.endpoint.session == old.endpoint.session
    reader.check_read(new, of=1)
    reader.memory[:] = CANARY
    assert one.address == two.address  # both are forks
    tag = reader.start(old, (GUARD, 5, MIB), of=1)
    assert reader.wait(tag) != [None]
    print("by the old name:", reader.ends[tag] or "the new one's bytes")
    reader.check_read(new, of=1)


@over(*BOTH, peers=2)
def test_connecting_to_a_stopped_peer_delays_no_other_read(reader: Reader) -> None:
    data_planes.test_connecting_to_a_stopped_peer_delays_no_other_read.body(reader)


@over(*BOTH, peers=2)
def test_a_reader_that_dies_leaves_its_peer_alone(reader: Reader) -> None:
    data_planes.test_a_reader_that_dies_leaves_its_peer_alone.body(reader)
