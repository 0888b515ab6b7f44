"""With SGLang's managers and the plugin over verbs, every byte of each decode buffer is correct and
went over the intended device. Importing SGLang takes minutes on an emulated processor."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rdma.far import Call
from rdma.verbs import IN_GUEST, Device, devices
from rig.channel.planes import Way, go
from rig.ring.model import Cache, Case, Request, draft_bytes
from rig.ring.special import Special

from sglang_mixkv.tools.doctor_read import devices_in_use

pytestmark = [pytest.mark.full, pytest.mark.timeout(7200)]
REQUESTS = Request(23, chunk_pages=2), Request(8, chunk_pages=1), Request(1), Request(12, 2)
DRAFT = Cache("mha", layers=2, heads=4, k_bytes=1024, v_bytes=1024)  # 300 times the target's
PACKET = 4096
SIDES = "prefill", "decode"
SHAPES = [(2, 1), (1, 2)]
BOTH = ["mooncake", "nixl"]


@pytest.fixture(scope="module")
def far() -> Iterator[Any]:
    """Start `serve_prefill` on the second machine, which begins to import SGLang."""
    call = Call("rdma.halves:serve_prefill") if IN_GUEST else None
    yield call
    if call is not None:
        call.close()


@pytest.fixture(scope="module")
def halves(far: Any) -> Iterator[Any]:
    """Import rdma.halves late, since it sets the environment for loopback without devices. `go`
    then sets a way's environment. Restore the environment at the end."""
    before = dict(os.environ)
    yield importlib.import_module("rdma.halves")
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def ready(halves: Any, far: Any) -> Any:
    assert far.recv() == "imported"
    return far


def two() -> list[Device]:
    """Return two devices, or one device twice."""
    return (devices() * 2)[:2]


def report_devices(rank: Any) -> None:
    rank.report.reasons.append(",".join(devices_in_use()))


def case_of(way: Way, shape: tuple[int, int], **special: Any) -> Case:
    ranks = [(side, n) for side, size in zip(SIDES, shape, strict=True) for n in range(size)]
    hosts = dict(zip(SIDES, (way.peer.host, way.reader.host), strict=True))
    return Case(
        *shape, backend=way.plane, draft=DRAFT, requests=REQUESTS,
        special=Special(faults=dict.fromkeys(ranks, report_devices), hosts=hosts, **special),
    )  # fmt: skip


def check(halves: Any, case: Case, prefill: Device, decode: Device, run: Any = None) -> None:
    """Check that all bytes are correct, and that each side's device carried the draft KV."""
    before = prefill.sent, decode.received
    outcome = halves.run.check_right(case, (run or halves.run.run)(case))
    for ranks, device in (outcome.prefill, prefill), (outcome.decode, decode):
        assert [rank.reasons for rank in ranks] == [[device.name]] * len(ranks)
    assert decode.received - before[1] > draft_bytes(case) // PACKET
    assert prefill.sent - before[0] > draft_bytes(case) // PACKET or run


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BOTH)
def test_every_byte(halves: Any, backend: str, shape: tuple[int, int]) -> None:
    """The bytes go over the wire, on each side by the device in --disaggregation-ib-device."""
    way = go(f"{backend}-wire")
    named = {"prefill": way.peer.devices, "decode": way.reader.devices}
    decode, prefill = two()
    check(halves, case_of(way, shape, ib_devices=named), prefill, decode)


@pytest.mark.parametrize("backend", BOTH)
def test_devices_by_gpu(halves: Any, backend: str, tmp_path: Path) -> None:
    """--disaggregation-ib-device maps GPUs to devices, as JSON on prefill and in a file on
    decode."""
    other, device = two()
    by_gpu = json.dumps({"1": other.name, "0": device.name})
    file = tmp_path / "devices.json"
    file.write_text(by_gpu)
    named = {"prefill": by_gpu, "decode": str(file)}
    way = go(f"{backend}-4")
    check(halves, case_of(way, SHAPES[0], ib_devices=named), device, device)


def test_ucx_net_devices_takes_precedence(halves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With UCX_NET_DEVICES, SGLang and the plugin both ignore --disaggregation-ib-device."""
    other, device = two()
    monkeypatch.setenv("UCX_NET_DEVICES", f"{device.name}:1")
    case = case_of(go("nixl-4"), SHAPES[1], ib_devices=dict.fromkeys(SIDES, other.name))
    check(halves, case, device, device)


@pytest.mark.parametrize("way", ["mooncake-far", "nixl-far"])
def test_two_hosts(halves: Any, ready: Any, way: str) -> None:
    """Prefill's ranks run on a second machine with its own kernel, address and clock."""
    of, device = go(way), devices()[2]
    named = dict.fromkeys(SIDES, device.name)
    case = case_of(of, SHAPES[0], ib_devices=named)
    check(halves, case, device, device, lambda case: halves.run_both(case, of, ready))
