"""Two prefill ranks and a decode rank over verbs, with their state machines and real threads."""

from __future__ import annotations

import importlib
import time
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
from rdma.verbs import devices, lose

from sglang_mixkv.tools.doctor_read import devices_in_use

on_one_device = pytest.mark.parametrize("way", ["mooncake-rdma", "nixl-rc"])
over_the_wire = pytest.mark.parametrize("way", ["mooncake-wire", "nixl-wire"])


@pytest.fixture(scope="module")
def rig() -> Any:
    """Import rdma.ranks late, since it imports torch."""
    return importlib.import_module("rdma.ranks")


@on_one_device
def test_requests_of_two_ranks_are_warm(rig: Any, way: str) -> None:
    """Each request has more segments than there are slots, and the device reads them."""

    def body(ranks: Any) -> None:
        device = devices()[0]
        before = device.sent
        assert [ranks.request() for _ in range(3)] == [("warm", "")] * 3
        assert ranks.decode.notes.bytes == 3 * ranks.pool.nbytes
        assert devices_in_use() == [device.name]
        assert device.sent - before > 3 * ranks.pool.nbytes // 4096

    rig.run(way, rig.PATIENT, body)


@over_the_wire
def test_a_link_that_is_down_for_2_s(rig: Any, way: str) -> None:
    """The link fails in the middle of a request. Either the device resends the lost packets, and
    the request is warm, or the read fails, and the request is cold."""

    def body(ranks: Any) -> None:
        number, handle = ranks.begin_midway()
        lose(100)
        try:
            time.sleep(2)
        finally:
            lose(0)
        found = ranks.end(number, handle)
        print(way, found)
        assert found in [("warm", ""), ("cold", "read")]
        assert ranks.until_warm() < 3

    rig.run(way, rig.PATIENT, body)


@over_the_wire
def test_a_link_that_stays_down(rig: Any, way: str) -> None:
    """While the link is down, reads fail and the request is cold. Once it is up, requests are warm
    again."""

    def body(ranks: Any) -> None:
        number, handle = ranks.begin_midway()
        lose(100)
        try:
            assert ranks.end(number, handle) == ("cold", "read")
        finally:
            lose(0)
        print(way, ranks.until_warm())

    rig.run(way, rig.PATIENT, body)


@over_the_wire
def test_a_request_does_not_wait_for_reads(rig: Any, way: str) -> None:
    """While the link is down, the request goes cold within its time limit. Bytes that arrive later
    are written only to slots."""

    def body(ranks: Any) -> None:
        assert ranks.until_warm() == 0
        number, handle = ranks.begin_midway()
        lose(100)
        try:
            began = time.monotonic()
            assert ranks.end(number, handle) == ("cold", "deadline")
            assert time.monotonic() - began < rig.HURRIED.whole_wait
        finally:
            lose(0)
        print(way, ranks.until_warm())

    rig.run(way, rig.HURRIED, body)


@over_the_wire
def test_a_stopped_rank_can_be_read(rig: Any, way: str) -> None:
    """Slots that the rank has announced are read while it is stopped, and are free again after it
    continues."""

    def body(ranks: Any) -> None:
        number, handle = ranks.begin_midway()
        ranks.prefill[0].signal(SIGSTOP)
        try:
            assert rig.wait_for(lambda: not ranks.is_read(0), 60)
            assert handle.state is None
        finally:
            ranks.prefill[0].signal(SIGCONT)
        assert ranks.end(number, handle) == ("warm", "")
        assert ranks.until_warm() == 0

    rig.run(way, rig.PATIENT, body)


@over_the_wire
def test_a_killed_rank_and_its_replacement(rig: Any, way: str) -> None:
    """The rank is killed during a read. That request is cold. Requests to the other rank alone are
    warm, and so are requests to both once a new rank has replaced the killed one."""

    def body(ranks: Any) -> None:
        number, handle = ranks.begin_midway()
        lose(100)
        try:
            assert rig.wait_for(lambda: ranks.is_read(0))
            ranks.prefill[0].kill()
        finally:
            lose(0)
        assert ranks.end(number, handle) == ("cold", "read")
        assert [ranks.request(1) for _ in range(2)] == [("warm", "")] * 2
        ranks.prefill[0] = ranks.spare
        ranks.decode.channel.drop(ranks.peers[0])
        ranks.peers[0] = ranks.decode.reach(ranks.spare.begin())
        assert ranks.until_warm() == 0

    rig.run(way, rig.PATIENT, body)
