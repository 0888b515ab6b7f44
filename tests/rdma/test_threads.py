"""Two prefill ranks and a decode rank, their machines and real threads, over verbs."""

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
    """Imported where it is used; see there."""
    return importlib.import_module("rdma.ranks")


@on_one_device
def test_requests_of_two_ranks_are_warm(rig: Any, way: str) -> None:
    """Each request has several segments, more than there are slots, and it is the device that reads
    them."""

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
    """The link fails in the middle of a request. The device resends what was lost, or gives up:
    then the drafter is cold, since it could not be read."""

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
    """Reads fail, each request is cold for that reason, and none once the link is up."""

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
    """The link of these reads is down: the request is cold in time, and bytes that land later land
    only in slots."""

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
def test_a_rank_that_stands_still(rig: Any, way: str) -> None:
    """The rank's announced slots are read meanwhile, and belong to it again once it goes on."""

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
def test_a_rank_that_is_killed(rig: Any, way: str) -> None:
    """The rank dies while it is read: that request is cold, those of the other rank alone are warm,
    and so are those of both once a new rank has taken its place."""

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
