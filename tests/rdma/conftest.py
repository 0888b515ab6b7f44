"""Tests over RDMA verbs, which are skipped without an RDMA device.

This module imports neither torch nor SGLang, since this takes minutes in an emulated guest.

In the ways `mooncake-rdma` and `nixl-rc`, a reader and its peers use one device. `-4` and `-6`
select its IPv4 or IPv6 GID. With `-wire`, the reader and its peers are at the two ends of the
guest's wire. With `-two`, each uses both devices. With `-far`, the peers are on the second guest.

Without --full, only the smoke tests run.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from rdma import far as far_machine
from rdma.verbs import IN_GUEST, devices
from rig.channel.planes import ENV, WAYS, Place, Way

RDMA = {"MOONCAKE_PROTOCOL": "rdma", "UCX_TLS": "rc"}
NAMES = {"mooncake": "mooncake-rdma", "nixl": "nixl-rc"}
GID = {"mooncake": "MC_GID_INDEX", "nixl": "UCX_IB_GID_INDEX"}
DEVICES = devices()
LAST = "test_managers", "test_restart"  # run last, so that earlier processes do not import SGLang
NO_IPV6 = DEVICES and DEVICES[0].gid(6) is None


def name_ways() -> None:
    here, there = (Place(one.address, one.name) for one in (DEVICES * 2)[:2])
    two = ",".join(device.name for device in DEVICES[:2])
    for plane, name in NAMES.items():
        WAYS[name] = Way(plane, RDMA, here, here)
        ipv4, ipv6 = (RDMA | {GID[plane]: str(DEVICES[0].gid(version))} for version in (4, 6))
        WAYS[f"{plane}-4"] = Way(plane, ipv4, here, here)
        WAYS[f"{plane}-6"] = Way(plane, ipv6, here, here)
        WAYS[f"{plane}-wire"] = Way(plane, ipv4, here, there)
        both = Place(here.host, two), Place(there.host, two)
        WAYS[f"{plane}-two"] = Way(plane, ipv4, *both)
        if IN_GUEST:
            near = DEVICES[2]
            env, far = RDMA | {GID[plane]: str(near.gid(4))}, far_machine.ADDRESS[0]
            WAYS[f"{plane}-far"] = Way(
                plane, env, *(Place(h, near.name) for h in (near.address, far))
            )


if DEVICES:
    name_ways()
    os.environ.update(ENV)
    # Import NIXL once, not in each forked process. Mooncake must be imported in each process, since
    # it reads its environment variables at import.
    importlib.import_module("nixl._api")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LAST.index(item.path.stem) if item.path.stem in LAST else -1)
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.path.stem != "test_smoke":
            item.add_marker(pytest.mark.full)
        way = item.name.partition("[")[2]
        reason = ""
        if not DEVICES:
            reason = "no RDMA device (bash scripts/rdma.sh)"
        elif way.endswith(("-wire]", "-two]")) and not IN_GUEST:
            reason = "needs two devices that a test may take down (bash scripts/rdma.sh)"
        elif "-far" in way and not IN_GUEST:
            reason = "needs a second machine that a test may restart (bash scripts/rdma.sh --full)"
        elif way.endswith("-6]") and NO_IPV6:
            reason = "the device has no IPv6 address"
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
