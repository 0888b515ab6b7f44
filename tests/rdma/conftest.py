"""What runs over RDMA verbs; skipped where there is no device. Neither torch nor SGLang is imported,
which takes minutes where a processor is emulated.

Ways: a reader and its peers on one device (`mooncake-rdma`, `nixl-rc`), or on both ends of the
guest's wire (`mooncake-wire`, `nixl-wire`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rig.planes import WAYS, Place, Way
from rig.verbs import IN_GUEST, devices

ENVS = {"mooncake": {"MOONCAKE_PROTOCOL": "rdma"}, "nixl": {"UCX_TLS": "rc"}}
DEVICES = devices()

if DEVICES:
    HERE = Place(DEVICES[0].address, DEVICES[0].name)
    WAYS["mooncake-rdma"] = Way("mooncake", ENVS["mooncake"], HERE, HERE)
    WAYS["nixl-rc"] = Way("nixl", ENVS["nixl"], HERE, HERE)
    if IN_GUEST:
        THERE = Place(DEVICES[1].address, DEVICES[1].name)
        WAYS["mooncake-wire"] = Way("mooncake", ENVS["mooncake"], HERE, THERE)
        WAYS["nixl-wire"] = Way("nixl", ENVS["nixl"], HERE, THERE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if not DEVICES:
            item.add_marker(pytest.mark.skip(reason="no RDMA device (bash scripts/rdma.sh)"))
        elif "wire" in item.name and not IN_GUEST:
            item.add_marker(pytest.mark.skip(reason="takes links down (bash scripts/rdma.sh)"))
