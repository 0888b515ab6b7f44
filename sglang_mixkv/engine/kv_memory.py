"""What memory SGLang's KV lies in, which the plugin's own buffers have to lie in too.

SGLANG_MOONCAKE_CUSTOM_MEM_POOL asks for an allocator of Mooncake's, whose transport may reach no
other memory. Where Mooncake has no such allocator SGLang's pools fall back to the usual memory
(disaggregation/mooncake/utils.py init_mooncake_custom_mem_pool).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.mooncake.utils import check_mooncake_custom_mem_pool_enabled

from sglang_mixkv.config import Config

logger = logging.getLogger(__name__)

USUAL = "INTRA_NODE_NVLINK"  # moves KV another way, and leaves it in the usual memory


@dataclass(frozen=True)
class KVMemory:
    """`asked`: the kind that the variable names, "" for the usual memory. `pool`: the
    torch.cuda.MemPool that the KV lies in, if any."""

    asked: str
    pool: Any

    @property
    def fell_back(self) -> bool:
        return self.asked not in ("", USUAL) and self.pool is None

    @property
    def kind(self) -> str:
        """What the KV is in."""
        return "" if self.fell_back else self.asked

    def fitting(self, config: Config) -> Config:
        """Without buffers of the plugin where they could not come from the pool asked for."""
        if not self.fell_back:
            return config
        logger.warning(
            "[MIXKV-MEM-01] sglang-mixkv: SGLANG_MOONCAKE_CUSTOM_MEM_POOL asks for %s, but the KV "
            "cache is not in such a pool (no mooncake.allocator?); draft KV goes without staging "
            "buffers, as with --mixkv-draft-transfer direct",
            self.asked,
        )
        return config.without_buffers()


def memory_of(kv_args: Any) -> KVMemory:
    """By what kv_args.describe noted; KV args that were built by hand are in the usual memory."""
    enabled, asked = check_mooncake_custom_mem_pool_enabled()
    return KVMemory((asked or "") if enabled else "", getattr(kv_args, "custom_mem_pool", None))
