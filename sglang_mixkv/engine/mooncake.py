"""SGLang's transfer engine, as a prefill rank uses it."""

from __future__ import annotations

import os
from functools import partial

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.environ import envs

from sglang_mixkv.transport.mooncake import BoundedEngine


def over_tcp() -> bool:
    """Whether the engine uses Mooncake's TCP transport (MooncakeTransferEngine.__init__)."""
    forced = os.environ.get("MC_FORCE_TCP") == "1"
    return forced or str(envs.MOONCAKE_PROTOCOL.get()).lower() == "tcp"


def within_limits(engine: MooncakeTransferEngine) -> MooncakeTransferEngine | BoundedEngine:
    """This engine; over TCP, within the limits of that transport."""
    return BoundedEngine(engine, partial(like, engine)) if over_tcp() else engine


def like(engine: MooncakeTransferEngine) -> MooncakeTransferEngine:
    """A new engine with the same settings."""
    return MooncakeTransferEngine(engine.hostname, engine.gpu_id, engine.ib_device)
