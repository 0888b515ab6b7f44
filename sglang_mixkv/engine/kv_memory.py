"""What memory SGLang's KV lies in, which the plugin's own buffers have to lie in too.

SGLANG_MOONCAKE_CUSTOM_MEM_POOL asks for an allocator of Mooncake's, whose transport may reach no
other memory. Where Mooncake has no such allocator SGLang's pools fall back to the usual memory; of
INTRA_NODE_NVLINK they always are there (disaggregation/mooncake/utils.py
init_mooncake_custom_mem_pool).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.mooncake.utils import check_mooncake_custom_mem_pool_enabled

from sglang_mixkv.config import Config

logger = logging.getLogger(__name__)

ALLOCATORS = ("NVLINK", "BAREX")


def asked_for() -> str:
    """The kind of allocator that the variable asks for, "" for none."""
    _, kind = check_mooncake_custom_mem_pool_enabled()
    return kind if kind in ALLOCATORS else ""


def custom_mem_pool(pool: Any) -> Any:
    """The torch.cuda.MemPool that this KV pool of SGLang's lies in, if any."""
    return pool.maybe_get_custom_mem_pool() if asked_for() else None


@dataclass(frozen=True)
class KVMemory:
    """`asked`: see asked_for; `pool`: see custom_mem_pool."""

    asked: str
    pool: Any

    @property
    def kind(self) -> str:
        """Of the allocator whose memory it is, "" for the usual memory."""
        return self.asked if self.pool is not None else ""

    def fitting(self, config: Config) -> Config:
        """Without buffers of the plugin where SGLang did not get the pool that it asked for: what
        this Mooncake reaches is not known."""
        if self.kind == self.asked:
            return config
        logger.warning(
            "[MIXKV-MEM-01] sglang-mixkv: SGLANG_MOONCAKE_CUSTOM_MEM_POOL asks for %s, but the KV "
            "cache is not in such a pool (no mooncake.allocator?); draft KV goes without staging "
            "buffers, as with --mixkv-draft-transfer direct",
            self.asked,
        )
        return config.without_buffers()


def memory_of(kv_args: Any, backend: str) -> KVMemory:
    """The KV's. It matters to Mooncake, and where the plugin moves a drafter's; KV args that were
    built by hand are in the usual memory."""
    if backend != "mooncake" or not kv_args.num_draft_entries:
        return KVMemory("", None)
    return KVMemory(asked_for(), getattr(kv_args, "custom_mem_pool", None))
