"""From SGLang's KV args and arguments to this rank's side."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.utils import build_transfer_entry_pairs
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel

from sglang_mixkv.config import config_of
from sglang_mixkv.decode import source
from sglang_mixkv.decode.landing import QUARANTINE_S
from sglang_mixkv.decode.rank import DecodeRank
from sglang_mixkv.engine import kv_args, releases
from sglang_mixkv.engine.check import check_once
from sglang_mixkv.engine.decode_tables import DecodeTables
from sglang_mixkv.engine.handshake import local_facts
from sglang_mixkv.engine.kv_memory import KVMemory, memory_of
from sglang_mixkv.engine.metrics import metrics_for
from sglang_mixkv.engine.prefill_tables import PrefillTables
from sglang_mixkv.prefill import peer
from sglang_mixkv.prefill.rank import PrefillRank
from sglang_mixkv.rows.host import HostRows, Rows
from sglang_mixkv.stats import Stats, TimedRows


class Rank:
    """What both sides are made of. Raises MixKVError for KV args that cannot be cut."""

    def __init__(self, manager: Any, args: Any, server_args: Any, mode: str, is_mla: bool) -> None:
        self.config = config_of(server_args)
        if self.config.enabled:
            check_once(server_args, self.config)
        memory = memory_of(args, manager.backend)
        self.config = memory.fitting(self.config)
        parallel = get_parallel()
        self.manager, self.args = manager, args
        self.tp = parallel.attn_tp_size
        self.pp_size, self.pp_rank = parallel.pp_size or 1, args.pp_rank or 0
        # All of the draft KV where pages become a prefix that other requests share, and where
        # SGLang compares whole pages.
        disagg = get_disagg()
        whole = (
            disagg.disaggregation_decode_enable_radix_cache
            or disagg.disaggregation_enable_kv_checksum
        )
        windows = () if whole else kv_args.windows_of(args)
        self.dcp = parallel.attn_dcp_size or 1
        self.caches = kv_args.caches(args, is_mla, self.tp, windows, self.dcp)
        self.facts = local_facts(args, self.caches, manager.backend, memory.kind)
        # State that every contacted rank sends: stock's rule for hybrid MLA and MHA targets.
        replicated = is_mla and not getattr(args, "is_hybrid_mla_backend", False)
        self.sharded_state = bool(getattr(args, "state_types", [])) and not replicated
        self.framing = releases.here().framings[manager.backend]
        self.stats = Stats(mode, self.config.stats_dir, metrics_for(mode))
        rows = rows_for(get_device().device, getattr(args, "gpu_id", 0), memory)
        self.rows: Rows = TimedRows(rows, self.stats)

    def prefill(self) -> PrefillRank:
        local = peer.Local(
            facts=self.facts,
            caches=self.caches,
            layer_ids=tuple(self.args.kv_layer_ids),
            start_layer=getattr(self.args, "prefill_start_layer", 0) or 0,
            stage=self.pp_rank,
            last_stage=self.pp_size - 1,
            sharded_state=self.sharded_state,
            pair_by_layer=build_transfer_entry_pairs,
            cold_allowed=self.config.on_draft_mismatch == "cold",
        )
        awaited = float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        tables = PrefillTables(self.manager)
        return PrefillRank(local, self.config, self.stats, self.rows, tables, self.framing, awaited)

    def decode(self) -> DecodeRank:
        args = self.args
        sizes = zip(args.aux_data_lens, args.aux_item_lens, strict=True)
        local = source.Local(
            facts=self.facts,
            caches=self.caches,
            tp=self.tp,
            rank=self.caches.target.rank,
            pp_size=self.pp_size,
            pp_rank=self.pp_rank,
            dcp_size=self.dcp,
            sharded_state=self.sharded_state,
            kv_data_lens=tuple(args.kv_data_lens),
            state_lens=tuple(map(tuple, args.state_data_lens)),
            aux_ptrs=tuple(args.aux_data_ptrs),
            aux_rows=tuple(length // item for length, item in sizes),
        )
        compares = bool(get_disagg().disaggregation_enable_kv_checksum)
        # SGLang frees the pages of an aborted request after that, whatever the transport does.
        release_s = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()
        return DecodeRank(
            local, self.config, self.stats, self.rows, DecodeTables(self.manager), self.framing,
            compares=compares, quarantine_s=max(QUARANTINE_S, 2.0 * release_s),
        )  # fmt: skip


def rows_for(device: str, gpu_id: int, memory: KVMemory) -> Rows:
    """The row copier of this engine's device, its buffers in the KV's kind of memory."""
    if device != "cuda":
        return HostRows()
    from sglang_mixkv.rows.cuda import CudaRows

    return CudaRows(gpu_id, memory.pool)
