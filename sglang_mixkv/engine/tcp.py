"""Whether Mooncake's engine uses its TCP transport, as far as that can be known."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.environ import envs


def over_tcp(engine: Any) -> bool:
    """Whether the engine uses Mooncake's TCP transport (MooncakeTransferEngine.__init__)."""
    forced = os.environ.get("MC_FORCE_TCP") == "1"
    return forced or str(envs.MOONCAKE_PROTOCOL.get()).lower() == "tcp"
