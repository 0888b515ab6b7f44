"""Prefill ranks whose KV comes back from SGLang's host cache: its host pools, its transfers.

What a rank holds of a request was computed in other pages, went to the host, was overwritten and
is loaded to the pages that it is sent from.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from rig import model
from rig.memory import Memory

FLAGS = {"enable_hierarchical_cache": True, "hicache_io_backend": "direct", "hicache_ratio": 2.0}


@dataclass(frozen=True)
class HostCache:
    """`layout`: --hicache-mem-layout. `packed`: the drafter's layer is one of the target's host
    pool, as with NextN; else it has a pool of its own. `restores_draft`: False leaves it out."""

    layout: str
    packed: bool = False
    restores_draft: bool = True

    def flags(self) -> dict[str, Any]:
        """What a server's arguments say of it."""
        return {**FLAGS, "hicache_mem_layout": self.layout}


def pass_through(memory: Memory, cache: HostCache) -> None:
    """The truth in a rank's pools leaves for the host and comes back."""
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine

    tables = model.page_tables(memory.case, memory.side)
    moved = [(pages + 1) % memory.case.pool_pages for pages in tables]
    for name, pool in memory.pools.items():
        for entry in pool:
            rows = [entry[pages] for pages in tables]
            overwrite(memory, entry, [1, len(name)])
            for pages, row in zip(moved, rows, strict=True):
                entry[pages] = row
    controller, engine = Controller(memory, cache), L2TransferEngine("direct")
    slots = [controller.group.alloc(len(p) * memory.case.page_size) for p in tables]
    for host, pages in zip(slots, moved, strict=True):
        engine.submit_device_to_host(controller.backup(host, pages))
    for name, pool in memory.pools.items():
        for entry in pool:
            overwrite(memory, entry, [2, len(name)])
    for host, pages in zip(slots, tables, strict=True):
        engine.submit_host_to_device(
            controller.load(host, pages), transfer_layer_id_max=controller.transfer_layer_id_max
        )


def overwrite(memory: Memory, entry: np.ndarray, seed: list[int]) -> None:
    entry[:] = model.canary([memory.case.seed, memory.rank, *seed], entry.shape)


class Controller:
    """What SGLang's HybridCacheController makes of a request's slots, over its own host pools."""

    def __init__(self, memory: Memory, cache: HostCache) -> None:
        from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler

        case, pools = memory.case, memory.sglang_pools
        layers = case.target.layers
        target = getattr(pools["target"], "full_kv_pool", pools["target"])  # a state stays
        self.cache, self.page_size = cache, case.page_size
        self.transfer_layer_id_max = layers
        self.mem_pool_host = self.group = assembler.build_kv_only_group(
            page_size=case.page_size, kv_pool=target, use_mla=case.target.is_mla,
            full_layer_mapping={i: i for i in range(layers)},
            mtp_draft_device_pools=(pools["draft"],) if cache.packed else (),
        )  # fmt: skip
        if not cache.packed:
            tree = SimpleNamespace(cache_controller=self)
            _, entries = assembler.build_hicache_draft_sidecars(
                draft_device_pools=(pools["draft"],), tree_cache=tree
            )
            for entry in entries:
                self.group.add_entry(entry)

    def backup(self, host: Any, pages: np.ndarray) -> list[Any]:
        """Transfers to these slots of the host."""
        return self._l2_transfers(host, self._slots(pages), self._of_draft(host, pages))

    def load(self, host: Any, pages: np.ndarray) -> list[Any]:
        """Transfers from there."""
        device, of_draft = self._slots(pages), self._of_draft(host, pages)
        if self.cache.restores_draft:
            return self._l2_load_transfers(host, device, of_draft)
        return self._l2_transfers(host, device)

    def _slots(self, pages: np.ndarray) -> Any:
        import torch

        tokens = pages[:, None].astype(np.int64) * self.page_size + np.arange(self.page_size)
        return torch.from_numpy(tokens.reshape(-1))

    def _of_draft(self, host: Any, pages: np.ndarray) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        if self.cache.packed:
            return None
        return self.group.resolve_host_transfers(
            [PoolTransfer(name=PoolName.DRAFT, indices_from_pool=PoolName.KV)],
            primary_device_indices=self._slots(pages), primary_host_indices=host,
        )  # fmt: skip

    def _l2_transfers(self, *args: Any) -> list[Any]:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

        return HybridCacheController._l2_transfers(self, *args)

    def _l2_load_transfers(self, *args: Any) -> list[Any]:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

        return HybridCacheController._l2_load_transfers(self, *args)
