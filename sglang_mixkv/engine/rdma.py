"""Whether the writes of SGLang's Mooncake engine go over RDMA.

Mooncake does not say which transport it chose (transfer_engine_impl.cpp, init). MC_FORCE_TCP
means TCP with any value, also "0" and none at all; a host on which it finds no RDMA device gets
TCP without a word; the protocol that it is told decides in a build for EFA alone, where any other
than "efa" means TCP. It does name the devices that it finds.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from pathlib import Path

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

DEVICES = Path("/sys/class/infiniband")
# Set to anything, another transport, or one that is chosen write by write, may be in use.
OTHERWISE = (
    "MC_FORCE_TCP", "MC_FORCE_SHM", "MC_FORCE_MNNVL", "MC_INTRANODE_NVLINK", "MC_USE_TENT",
    "MC_USE_TEV1", "USE_BAREX",
)  # fmt: skip


def over_rdma(engine: MooncakeTransferEngine) -> bool:
    """Whether this engine's writes certainly go over RDMA: False when in doubt."""
    if any(name in os.environ for name in OTHERWISE):
        return False
    protocol = str(envs.MOONCAKE_PROTOCOL.get()).lower()
    for_efa = getattr(importlib.import_module("mooncake.engine"), "SUPPORT_EFA", None)
    if for_efa is None:
        return False
    return protocol == ("efa" if for_efa else "rdma") and (for_efa or _finds_devices(engine))


def _finds_devices(engine: MooncakeTransferEngine) -> bool:
    """Whether Mooncake finds an RDMA device among those that this engine may use. A driver that
    a container lacks hides one that the kernel lists."""
    if not (DEVICES.is_dir() and any(DEVICES.iterdir())):
        return False
    try:
        found = json.loads(engine.engine.get_local_topology(engine.ib_device or ""))
        return any(names for places in found.values() for names in places)
    except Exception:
        logger.warning(
            "[MIXKV-SELF-01] sglang-mixkv does not know which devices Mooncake uses", exc_info=True
        )
        return False
