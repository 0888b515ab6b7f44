"""The machine of the prefill ranks restarts: the second guest of scripts/rdma.sh."""

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
    """Import rdma.ranks late, since it imports torch. Import it on the second machine as well, so
    that the import does not count as a test's time."""
    Call("rdma.ranks:imported").recv()
    return importlib.import_module("rdma.ranks")


@pytest.mark.parametrize("way", ["mooncake-far", "nixl-far"])
def test_a_restart_of_prefills_host(rig: Any, way: str) -> None:
    """The host restarts during a read. The request is cold, because its read failed or timed out,
    and no row is wrong. The host's new ranks have new instances, and all requests to them are
    warm."""

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
