"""SGLang's own managers over verbs, as in tests/protocol/. Its import takes many minutes where a
processor is emulated."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from rdma.conftest import RDMA
from rig.forks import STRETCH
from rig.verbs import devices

pytestmark = [pytest.mark.full, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def ring() -> Iterator[Any]:
    load = importlib.import_module("rig.load")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MC_FORCE_TCP", raising=False)
        patch.setenv("UCX_NET_DEVICES", f"{devices()[0].name}:1")
        patch.setenv("SGLANG_MIXKV_PATIENCE", str(10 * STRETCH))
        patch.setenv("SGLANG_MIXKV_STAGING_MB", "8")
        for variable in RDMA.items():
            patch.setenv(*variable)
        load.load_sglang()
        yield importlib.import_module("rig.ring")


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_every_byte(ring: Any, prefill_tp: int, decode_tp: int, backend: str) -> None:
    model = importlib.import_module("rig.model")
    requests = model.Request(23, chunk_pages=2), model.Request(1), model.Request(12, prefix_pages=2)
    before = [device.sent for device in devices()]
    ring.right(model.Case(prefill_tp, decode_tp, requests=requests, backend=backend))
    assert [device.sent for device in devices()] != before
