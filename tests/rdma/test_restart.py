"""Prefill ranks on another machine, which is restarted: the second guest of scripts/rdma.sh."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
from rdma.far import Call
from rdma.verbs import devices, lose

from sglang_mixkv.tools.doctor_read import devices_in_use

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def rig() -> Any:
    """Imported where it is used; on the second machine too, before a test's time begins."""
    Call("rdma.ranks:imported").recv()
    return importlib.import_module("rdma.ranks")


@pytest.mark.parametrize("way", ["mooncake-far", "nixl-far"])
def test_a_host_that_is_restarted(rig: Any, way: str) -> None:
    """The host restarts while its ranks are read: that request is cold, since it could not be read,
    or not in time, and no row is wrong. Its new ranks are other instances, and warm from the first
    request."""

    def body(ranks: Any) -> None:
        device = devices()[2]
        before = device.received
        assert [ranks.request() for _ in range(3)] == [("warm", "")] * 3
        assert devices_in_use() == [device.name]
        assert device.received - before > 3 * ranks.pool.nbytes // 4096
        restart = Call("rdma.far:restart")
        number, handle = ranks.begin_midway()
        restart.send(1.0)
        time.sleep(0.3)
        lose(100, device.network)  # so that a read is in flight
        try:
            assert rig.wait_for(lambda: ranks.is_read(0) or ranks.is_read(1))
            time.sleep(2)
        finally:
            lose(0, device.network)
        for rank in ranks.prefill:
            rank.kill()
        began, found = time.monotonic(), ranks.end(number, handle)
        print(way, found, f"after {time.monotonic() - began:.1f} s")
        assert found in [("cold", "read"), ("cold", "deadline")]
        for n, rank in enumerate(ranks.prefill):
            ranks.decode.channel.drop(ranks.peers[n])
            ranks.peers[n] = ranks.decode.reach(rank.begin())
        assert ranks.until_warm() == 0

    rig.run(way, rig.PATIENT, body, rig.FarServed)
